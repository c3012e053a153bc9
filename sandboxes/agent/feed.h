/* The stdin of a call on its way from frames into a pipe. */
#ifndef ROLLWAY_FEED_H
#define ROLLWAY_FEED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "loop.h"

enum { STDIN_WINDOW = 1048576 };

/* Counted from the start of the call's stdin: bytes [written, accepted) are held. */
struct feed {
    uint64_t accepted, written, allowed;
    uint8_t *bytes;
    size_t size, start;
    bool ended;
};

void feed_open(struct feed *feed);
/* Takes bytes that begin at `offset`; none: the end. What it has already is dropped; what `pipe` takes at once goes there. False on a gap,
 * or past the window. */
bool feed_add(struct feed *feed, uint64_t offset, const uint8_t *bytes, size_t count, const struct source *pipe);
/* Writes as much as the pipe takes and closes it after the last byte. Where nobody reads any more the bytes go to nowhere. */
void feed_write(struct feed *feed, struct source *pipe);
void feed_close(struct feed *feed);

#endif
