#define _GNU_SOURCE
#include "loop.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 64, DYING_MAX = 4096 };

static int epoll_fd = -1;
static void *dying[DYING_MAX];
static size_t dying_count;

void loop_open(void) {
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0) {
        perror("rollway agent: epoll");
        exit(70);
    }
}

int source_open(struct source *source, int fd, uint32_t events, source_handler *ready) {
    struct epoll_event event = {.events = events, .data.ptr = source};
    *source = (struct source){.fd = fd, .events = events, .ready = ready};
    if (events == 0 || epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0)
        return 0;
    int reason = errno;
    close(fd);
    source->fd = -1;
    errno = reason;
    return -1;
}

void source_want(struct source *source, uint32_t events) {
    if (source->fd < 0 || source->events == events)
        return;
    /* A hung-up pipe is reported even when nothing is asked for: with nothing wanted it leaves the set, or the loop would spin. */
    struct epoll_event event = {.events = events, .data.ptr = source};
    int change = source->events == 0 ? EPOLL_CTL_ADD : events == 0 ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
    epoll_ctl(epoll_fd, change, source->fd, &event);
    source->events = events;
}

void source_close(struct source *source) {
    if (source->fd < 0)
        return;
    source_want(source, 0); /* a forked child may still share the description, which would keep it in the set */
    close(source->fd);
    source->fd = -1;
}

int source_take(struct source *source) {
    int fd = source->fd;
    source_want(source, 0);
    source->fd = -1;
    return fd;
}

static int wait_ms(int64_t deadline_us) {
    if (deadline_us == 0)
        return -1;
    int64_t left = deadline_us - now_us();
    if (left <= 0)
        return 0;
    return left > 3600000000 ? 3600000 : (int)((left + 999) / 1000);
}

void loop_turn(int64_t deadline_us) {
    struct epoll_event events[BATCH];
    int count = epoll_wait(epoll_fd, events, BATCH, wait_ms(deadline_us));
    for (int i = 0; i < count; i++) {
        struct source *source = events[i].data.ptr;
        if (source->fd >= 0 && source->events != 0)
            source->ready(source, events[i].events);
    }
    while (dying_count > 0)
        free(dying[--dying_count]);
}

void loop_free_later(void *block) {
    if (dying_count < DYING_MAX) /* else it is lost memory, which harms less than a handler on freed memory */
        dying[dying_count++] = block;
}

int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}
