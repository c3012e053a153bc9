#define _GNU_SOURCE
#include "walk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PASSES = 4096 }; /* over one directory that others go on filling, or that is deeper than a walk */

void walk_begin(struct walk *walk, int fd, int limit) {
    walk->limit = limit;
    walk->depth = 1;
    walk->levels[0].fd = fd;
    walk->levels[0].next = walk->levels[0].end = 0;
}

int walk_fd(const struct walk *walk) { return walk->levels[walk->depth - 1].fd; }

const char *walk_next(struct walk *walk) {
    struct walk_level *level = &walk->levels[walk->depth - 1];
    for (;;) {
        if (level->next >= level->end) {
            int got = (int)syscall(SYS_getdents64, level->fd, level->entries, WALK_BATCH);
            if (got <= 0) return NULL;
            level->next = 0;
            level->end = (unsigned)got;
        }
        const struct dirent *entry = (const void *)(level->entries + level->next);
        level->next += entry->d_reclen;
        level->current = entry->d_name;
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) return entry->d_name;
    }
}

int walk_down(struct walk *walk, const char *name) {
    if (walk->depth >= walk->limit) {
        errno = ELOOP;
        return -1;
    }
    int fd = openat(walk_fd(walk), name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return -1;
    struct walk_level *level = &walk->levels[walk->depth++];
    level->fd = fd;
    level->next = level->end = 0;
    return 0;
}

void walk_up(struct walk *walk) { close(walk->levels[--walk->depth].fd); }

void walk_again(struct walk *walk) {
    struct walk_level *level = &walk->levels[walk->depth - 1];
    lseek(level->fd, 0, SEEK_SET);
    level->next = level->end = 0;
}

void walk_end(struct walk *walk) {
    while (walk->depth > 0) walk_up(walk);
}

/* No level is left: the subtree moves up to where the removal began, whose next pass finds it. */
static int lift(struct walk *walk, const char *name, unsigned *lifted) {
    char free_name[32];
    snprintf(free_name, sizeof free_name, ".rollway-%d-%u", (int)getpid(), (*lifted)++);
    return renameat(walk_fd(walk), name, walk->levels[0].fd, free_name);
}

static int empty(struct walk *walk, unsigned *lifted) {
    unsigned passes = 0;
    while (walk->depth > 0) {
        const char *name = walk_next(walk);
        if (name != NULL) {
            if (unlinkat(walk_fd(walk), name, 0) == 0 || errno == ENOENT) continue;
            if (errno != EISDIR) return -1;
            if (walk_down(walk, name) == 0) continue;
            if (errno != ELOOP || lift(walk, name, lifted) != 0) return -1;
            continue;
        }
        if (walk->depth == 1) return 0;
        struct walk_level *above = &walk->levels[walk->depth - 2];
        if (unlinkat(above->fd, above->current, AT_REMOVEDIR) == 0 || errno == ENOENT) {
            walk_up(walk);
        } else if (errno == ENOTEMPTY && ++passes < PASSES) {
            walk_again(walk);
        } else {
            return -1;
        }
    }
    return 0;
}

int walk_remove(struct walk *walk, int parent, const char *name) {
    if (unlinkat(parent, name, 0) == 0 || errno == ENOENT) return 0;
    if (errno != EISDIR) return -1;
    unsigned lifted = 0;
    for (unsigned pass = 0; pass < PASSES; pass++) {
        int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0) return errno == ENOENT ? 0 : -1;
        walk_begin(walk, fd, WALK_DEPTH);
        int done = empty(walk, &lifted), why = errno;
        walk_end(walk);
        errno = why;
        if (done < 0) return -1;
        if (unlinkat(parent, name, AT_REMOVEDIR) == 0 || errno == ENOENT) return 0;
        if (errno != ENOTEMPTY) return -1;
    }
    return -1;
}
