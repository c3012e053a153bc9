/* Frames as bytes (PROTOCOL.md): little-endian fields, CRC-32, and a parser that finds its way back after anything. */
#ifndef ROLLWAY_FRAME_H
#define ROLLWAY_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    VERSION = 1,
    HEADER_BYTES = 32,
    PAYLOAD_MAX = 65536,
    FRAME_MAX = HEADER_BYTES + PAYLOAD_MAX,
    FLAG_MORE = 1,
    FLAG_DURABLE = 2,
};

enum frame_type {
    HELLO = 1,
    RUN = 2,
    STDIN = 3,
    CREDIT = 4,
    KILL = 5,
    FORGET = 6,
    KILL_ALL = 7,
    PING = 8,
    CONFIGURE = 9,
    WELCOME = 65,
    FENCED = 66,
    RESULT = 67,
    DATA = 68,
    GIVEN = 69, /* the agent's CREDIT for STDIN */
    ERROR = 70,
    DONE = 71,
    PONG = 72,
    LOST = 73,
};

/* Codes of ERROR. */
enum refusal {
    ERROR_UNKNOWN = 1,
    ERROR_FULL = 2,
    ERROR_BAD_REQUEST = 3,
    ERROR_NO_USER = 4,
    ERROR_NO_PROCESS = 5,
    ERROR_TOO_LARGE = 6,
    ERROR_NO_SHELL = 7,
};

struct frame {
    uint8_t type, flags;
    uint64_t channel, call;
    const uint8_t *payload;
    uint32_t length;
};

static inline uint16_t get16(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }
static inline uint32_t get32(const uint8_t *at) { return (uint32_t)get16(at) | (uint32_t)get16(at + 2) << 16; }
static inline uint64_t get64(const uint8_t *at) { return (uint64_t)get32(at) | (uint64_t)get32(at + 4) << 32; }
static inline void put16(uint8_t *at, uint16_t value) { at[0] = (uint8_t)value, at[1] = (uint8_t)(value >> 8); }
static inline void put32(uint8_t *at, uint32_t value) { put16(at, (uint16_t)value), put16(at + 2, (uint16_t)(value >> 16)); }
static inline void put64(uint8_t *at, uint64_t value) { put32(at, (uint32_t)value), put32(at + 4, (uint32_t)(value >> 32)); }

/* Once, before anything else here. */
void frame_prepare(void);

/* Writes the header of `frame` to `at`; its payload must already follow there (frame->payload is not looked at). */
void frame_seal(uint8_t *at, const struct frame *frame);

/* Cuts a stream into frames. It holds at most two whole frames. */
struct parser {
    uint8_t *bytes;
    size_t start, end;
    uint64_t zeros; /* how many zero bytes stand directly before `start` */
    bool lost;
};

void parser_open(struct parser *parser);
/* Where to put more bytes, and how many fit: never 0 after parser_next said PARSER_EMPTY. */
uint8_t *parser_space(struct parser *parser, size_t *size);
void parser_fill(struct parser *parser, size_t count);

enum parsed { PARSER_EMPTY, PARSER_FRAME, PARSER_LOST };

/* The next frame, whose payload lies in the parser until parser_space is asked for; or that the parser just lost its way (said once). */
enum parsed parser_next(struct parser *parser, struct frame *frame);

#endif
