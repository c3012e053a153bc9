#define _GNU_SOURCE
#include "feed.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "memory.h"

void feed_open(struct feed *feed) { *feed = (struct feed){.allowed = STDIN_WINDOW}; }

static size_t held(const struct feed *feed) { return (size_t)(feed->accepted - feed->written); }

static bool make_room(struct feed *feed, size_t count) {
    size_t length = held(feed);
    if (feed->start + length + count <= feed->size)
        return true;
    if (feed->start > 0) {
        memmove(feed->bytes, feed->bytes + feed->start, length);
        feed->start = 0;
    }
    if (length + count <= feed->size)
        return true;
    size_t size = feed->size * 2 > length + count ? feed->size * 2 : length + count;
    uint8_t *made = memory_resize(feed->bytes, feed->size, size);
    if (made == NULL)
        return false;
    memory_keep_from_children(made, size);
    feed->bytes = made;
    feed->size = size;
    return true;
}

/* What the pipe takes at once need not be held. */
static size_t pass_on(struct feed *feed, const uint8_t *bytes, size_t count, const struct source *pipe) {
    if (held(feed) > 0 || pipe == NULL || pipe->fd < 0)
        return 0;
    ssize_t passed = write(pipe->fd, bytes, count);
    if (passed <= 0)
        return 0;
    feed->accepted += (uint64_t)passed;
    feed->written = feed->accepted;
    return (size_t)passed;
}

bool feed_add(struct feed *feed, uint64_t offset, const uint8_t *bytes, size_t count, const struct source *pipe) {
    if (offset > feed->accepted)
        return false;
    uint64_t known = feed->accepted - offset;
    if (count == 0) {
        feed->ended |= known == 0;
        return true;
    }
    if (known >= count)
        return true;
    bytes += known;
    count -= (size_t)known;
    if (feed->ended || held(feed) + count > STDIN_WINDOW)
        return false;
    size_t passed = pass_on(feed, bytes, count, pipe);
    bytes += passed;
    count -= passed;
    if (count == 0)
        return true;
    if (!make_room(feed, count))
        return false;
    memcpy(feed->bytes + feed->start + held(feed), bytes, count);
    feed->accepted += count;
    return true;
}

void feed_write(struct feed *feed, struct source *pipe) {
    while (held(feed) > 0 && pipe != NULL && pipe->fd >= 0) {
        ssize_t count = write(pipe->fd, feed->bytes + feed->start, held(feed));
        if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
            source_want(pipe, EPOLLOUT);
            return;
        }
        if (count < 0)
            source_close(pipe);
        else {
            feed->written += (uint64_t)count;
            feed->start += (size_t)count;
        }
    }
    feed->written = feed->accepted;
    feed->start = 0;
    if (pipe == NULL)
        return;
    source_want(pipe, 0);
    if (feed->ended)
        source_close(pipe);
}

void feed_close(struct feed *feed) {
    memory_resize(feed->bytes, feed->size, 0);
    feed->bytes = NULL;
    feed->size = feed->start = 0;
    feed->written = feed->accepted;
}
