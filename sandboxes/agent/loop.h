/* The agent's only place to wait: file descriptors with handlers, on epoll. */
#ifndef ROLLWAY_LOOP_H
#define ROLLWAY_LOOP_H

#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>

struct source;
typedef void source_handler(struct source *source, uint32_t events);

/* A descriptor that is watched. fd is -1 while there is none. It is embedded in what it belongs to; see `owner_of`. */
struct source {
    int fd;
    uint32_t events;
    source_handler *ready;
};

#define owner_of(pointer, type, member) ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

void loop_open(void);

/* Watches `fd` and owns it from here on. Returns 0, or -1 with errno and the descriptor closed. */
int source_open(struct source *source, int fd, uint32_t events, source_handler *ready);
void source_want(struct source *source, uint32_t events);
/* Closes the descriptor. Does nothing where there is none. */
void source_close(struct source *source);

/* Watches the descriptor no more and gives it back, open. */
int source_take(struct source *source);

/* Waits at most until `deadline_us` (0: for ever) and calls the handlers of what is ready. */
void loop_turn(int64_t deadline_us);

/* Frees `block` after the handlers of this turn: one of them may still be about to be called with it. */
void loop_free_later(void *block);

/* Microseconds of the monotonic clock. */
int64_t now_us(void);

/* The earlier of two times, of which 0 is none. */
static inline int64_t earlier(int64_t a, int64_t b) { return a == 0 || (b != 0 && b < a) ? b : a; }

#endif
