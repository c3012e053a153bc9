#include "capture.h"

#include <stdbool.h>
#include <string.h>

#include "memory.h"

enum { FIRST_BYTES = 1024, HELD_MAX = 160 * 1024 * 1024 };

void capture_open(struct capture *capture, uint32_t cap) {
    *capture = (struct capture){.head_max = cap - cap / 2, .tail_max = cap / 2};
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Makes room for `wanted` bytes as far as the maximum and memory allow; what is kept gets less where they do not. */
static void grow(uint8_t **block, size_t *size, size_t wanted, size_t max) {
    size_t next = *size ? *size : FIRST_BYTES;
    while (next < wanted)
        next *= 2;
    next = least(next, max);
    if (next <= *size || memory_held() + next > HELD_MAX)
        return;
    uint8_t *made = memory_resize(*block, *size, next);
    if (made == NULL)
        return;
    memory_keep_from_children(made, next);
    *block = made;
    *size = next;
}

static size_t add_head(struct capture *capture, const uint8_t *bytes, size_t count) {
    if (capture->tail_length > 0 || capture->head_length == capture->head_max)
        return 0;
    size_t wanted = capture->head_length + count;
    if (wanted > capture->head_size)
        grow(&capture->head, &capture->head_size, wanted, capture->head_max);
    size_t taken = least(count, capture->head_size - capture->head_length);
    if (taken > 0)
        memcpy(capture->head + capture->head_length, bytes, taken);
    capture->head_length += taken;
    return taken;
}

static void add_ring(struct capture *capture, const uint8_t *bytes, size_t count) {
    if (count > capture->tail_size) {
        bytes += count - capture->tail_size;
        count = capture->tail_size;
    }
    while (count > 0) {
        size_t piece = least(count, capture->tail_size - capture->tail_next);
        memcpy(capture->tail + capture->tail_next, bytes, piece);
        capture->tail_next = (capture->tail_next + piece) % capture->tail_size;
        bytes += piece;
        count -= piece;
    }
}

static void add_tail(struct capture *capture, const uint8_t *bytes, size_t count) {
    size_t wanted = capture->tail_length + count;
    bool ring = capture->tail_next > 0; /* a ring that has begun to turn cannot grow any more */
    if (wanted > capture->tail_size && capture->tail_size < capture->tail_max && !ring)
        grow(&capture->tail, &capture->tail_size, wanted, capture->tail_max);
    size_t taken = least(count, capture->tail_size - capture->tail_length);
    if (taken > 0)
        memcpy(capture->tail + capture->tail_length, bytes, taken);
    capture->tail_length += taken;
    if (taken < count && capture->tail_size > 0)
        add_ring(capture, bytes + taken, count - taken);
}

void capture_add(struct capture *capture, const uint8_t *bytes, size_t count) {
    capture->printed += count;
    size_t taken = add_head(capture, bytes, count);
    if (taken < count)
        add_tail(capture, bytes + taken, count - taken);
}

/* Copies the part of `piece` that [offset, offset + count) covers, where `piece` stands at `begin` of the whole. */
static size_t copy_piece(const uint8_t *piece, size_t length, size_t begin, size_t offset, uint8_t *at, size_t count) {
    if (length == 0 || offset >= begin + length || offset + count <= begin)
        return 0;
    size_t from = offset > begin ? offset - begin : 0;
    size_t to = least(length, offset + count - begin);
    memcpy(at + (begin + from - offset), piece + from, to - from);
    return to - from;
}

size_t capture_copy(const struct capture *capture, size_t offset, uint8_t *at, size_t count) {
    size_t head = capture->head_length, old = capture->tail_length - capture->tail_next;
    size_t copied = copy_piece(capture->head, head, 0, offset, at, count);
    if (capture->tail_length == 0)
        return copied;
    copied += copy_piece(capture->tail + capture->tail_next, old, head, offset, at, count);
    return copied + copy_piece(capture->tail, capture->tail_next, head + old, offset, at, count);
}

void capture_close(struct capture *capture) {
    memory_resize(capture->head, capture->head_size, 0);
    memory_resize(capture->tail, capture->tail_size, 0);
    *capture = (struct capture){0};
}
