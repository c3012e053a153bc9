/* A walk over a directory tree that follows nothing, allocates nothing and holds one open directory a level. */
#ifndef ROLLWAY_WALK_H
#define ROLLWAY_WALK_H

#include <stddef.h>

enum { WALK_DEPTH = 1000, WALK_BATCH = 2048 };

struct walk_level {
    int fd;
    unsigned next, end;  /* in entries: the first one not given yet, and past the last */
    const char *current; /* the name given last, good until the next walk_next of this level */
    char entries[WALK_BATCH];
};

/* Large, so static; memory is touched only as deep as a walk goes. */
struct walk {
    int depth; /* levels open; the last is where the walk stands */
    int limit; /* the most levels, at most WALK_DEPTH */
    struct walk_level levels[WALK_DEPTH];
};

/* Starts at the directory `fd`, which is the walk's to close from here on. */
void walk_begin(struct walk *walk, int fd, int limit);

/* The next name in the directory where the walk stands, in no order and without `.` and `..`; NULL at its end. */
const char *walk_next(struct walk *walk);

/* Goes down into the directory `name`: 0, or -1 with errno (ELOOP: no level is left). */
int walk_down(struct walk *walk, const char *name);

/* Leaves the directory where the walk stands; the walk has ended when depth is 0. */
void walk_up(struct walk *walk);

/* Starts the directory where the walk stands anew. */
void walk_again(struct walk *walk);

/* Closes whatever is open. */
void walk_end(struct walk *walk);

/* The directory where the walk stands. */
int walk_fd(const struct walk *walk);

/* Removes what lies at `name` in the directory `parent`, links themselves and not what they lead to; of any depth. 0, also when there
 * is nothing, or -1 with errno. */
int walk_remove(struct walk *walk, int parent, const char *name);

#endif
