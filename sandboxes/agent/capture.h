/* What a call printed: its first and its last bytes, at most `cap` in all. Grows with what is printed. */
#ifndef ROLLWAY_CAPTURE_H
#define ROLLWAY_CAPTURE_H

#include <stddef.h>
#include <stdint.h>

struct capture {
    uint64_t printed;
    uint32_t head_max, tail_max;
    uint8_t *head, *tail;
    size_t head_size, head_length; /* allocated, used */
    size_t tail_size, tail_length;
    size_t tail_next; /* where the next byte goes once the tail is full: it is a ring then */
};

void capture_open(struct capture *capture, uint32_t cap);
void capture_add(struct capture *capture, const uint8_t *bytes, size_t count);
/* Copies up to `count` bytes of head and tail, from `offset` of both together, to `at`; how many. */
size_t capture_copy(const struct capture *capture, size_t offset, uint8_t *at, size_t count);
void capture_close(struct capture *capture);

#endif
