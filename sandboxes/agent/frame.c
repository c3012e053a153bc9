#include "frame.h"

#include "memory.h"

static const uint8_t MAGIC[4] = {'R', 'L', 'W', 'Y'};

enum { CRC_AT = 28, BUFFER_BYTES = 2 * FRAME_MAX };

/* crc_tables[k][b]: the CRC of byte b followed by k zero bytes, so that eight bytes are looked up at once. */
static uint32_t crc_tables[8][256];

void frame_prepare(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
        crc_tables[0][byte] = crc;
    }
    for (int table = 1; table < 8; table++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = crc_tables[table - 1][byte];
            crc_tables[table][byte] = before >> 8 ^ crc_tables[0][before & 255];
        }
}

static uint32_t crc_more(uint32_t crc, const uint8_t *at, size_t count) {
    for (; count >= 8; at += 8, count -= 8) {
        uint32_t low = crc ^ get32(at), high = get32(at + 4);
        crc = crc_tables[7][low & 255] ^ crc_tables[6][low >> 8 & 255] ^ crc_tables[5][low >> 16 & 255] ^ crc_tables[4][low >> 24] ^
              crc_tables[3][high & 255] ^ crc_tables[2][high >> 8 & 255] ^ crc_tables[1][high >> 16 & 255] ^ crc_tables[0][high >> 24];
    }
    for (; count > 0; at++, count--)
        crc = crc >> 8 ^ crc_tables[0][(crc ^ *at) & 255];
    return crc;
}

static uint32_t frame_crc(const uint8_t *at, uint32_t length) {
    return ~crc_more(crc_more(~0u, at, CRC_AT), at + HEADER_BYTES, length);
}

void frame_seal(uint8_t *at, const struct frame *frame) {
    memcpy(at, MAGIC, sizeof MAGIC);
    at[4] = frame->type;
    at[5] = frame->flags;
    put16(at + 6, 0);
    put64(at + 8, frame->channel);
    put64(at + 16, frame->call);
    put32(at + 24, frame->length);
    put32(at + CRC_AT, frame_crc(at, frame->length));
}

void parser_open(struct parser *parser) { *parser = (struct parser){.bytes = memory_fixed(BUFFER_BYTES, true)}; }

uint8_t *parser_space(struct parser *parser, size_t *size) {
    if (parser->start == parser->end)
        parser->start = parser->end = 0;
    if (BUFFER_BYTES - parser->end < FRAME_MAX && parser->start > 0) {
        memmove(parser->bytes, parser->bytes + parser->start, parser->end - parser->start);
        parser->end -= parser->start;
        parser->start = 0;
    }
    *size = BUFFER_BYTES - parser->end;
    return parser->bytes + parser->end;
}

void parser_fill(struct parser *parser, size_t count) { parser->end += count; }

static void skip_zeros(struct parser *parser) {
    while (parser->start < parser->end && parser->bytes[parser->start] == 0) {
        parser->start++;
        parser->zeros++;
    }
}

/* Steps over a frame, be its CRC right or wrong, as a whole: its payload is never searched for frames, for a file could hold one. The zeros
 * at its end may be those of a preamble that filled it up. */
static void pass_frame(struct parser *parser, size_t size) {
    parser->start += size;
    const uint8_t *end = parser->bytes + parser->start;
    parser->zeros = 0;
    while (parser->zeros < size && end[-1 - (ptrdiff_t)parser->zeros] == 0)
        parser->zeros++;
}

/* A frame with a right CRC counts unless the parser is lost; then only a HELLO behind a whole preamble ends that. No payload holds one:
 * the preamble is longer. */
static bool counts(const struct parser *parser, uint8_t type) {
    return !parser->lost || (type == HELLO && parser->zeros >= FRAME_MAX);
}

static bool get_lost(struct parser *parser) {
    bool first = !parser->lost;
    parser->lost = true;
    return first;
}

enum parsed parser_next(struct parser *parser, struct frame *frame) {
    for (;;) {
        skip_zeros(parser);
        const uint8_t *at = parser->bytes + parser->start;
        size_t size = parser->end - parser->start;
        if (size < HEADER_BYTES)
            return PARSER_EMPTY;
        uint32_t length = get32(at + 24);
        if (memcmp(at, MAGIC, sizeof MAGIC) != 0 || length > PAYLOAD_MAX || get16(at + 6) != 0) {
            parser->start++;
            parser->zeros = 0;
            if (get_lost(parser))
                return PARSER_LOST;
            continue;
        }
        if (size < HEADER_BYTES + length)
            return PARSER_EMPTY;
        if (get32(at + CRC_AT) != frame_crc(at, length)) {
            pass_frame(parser, HEADER_BYTES + length);
            if (get_lost(parser))
                return PARSER_LOST;
            continue;
        }
        *frame = (struct frame){at[4], at[5], get64(at + 8), get64(at + 16), at + HEADER_BYTES, length};
        bool taken = counts(parser, frame->type);
        pass_frame(parser, HEADER_BYTES + length);
        if (taken) {
            parser->lost = false;
            return PARSER_FRAME;
        }
    }
}
