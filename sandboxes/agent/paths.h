/* Paths in a sandbox, taken one component at a time; what is made belongs to the sandbox's user. */
#ifndef ROLLWAY_PATHS_H
#define ROLLWAY_PATHS_H

#include <stddef.h>
#include <sys/stat.h>

#include "files.h"

enum follow {
    FOLLOW_NONE, /* no link */
    FOLLOW_OLD,  /* links to directories, but those that this call made: an archive must not lead itself elsewhere. And of those that are
                    not root's, only what leads to a directory of the user's own */
};

/* Whose sandbox it is; once, before anything else here. */
void paths_of(const struct files_owner *owner);

enum { PATH_FAILED = -1, PATH_REFUSED = -2 };

/* The directory that `path`'s last component lies in, open, and that component in `*name` (`.` for `/` itself; good while `path` is).
 * Where `owner` is given, missing directories are made and belong to it. The directory is this module's: good until the next call, which is
 * cheap for the same one. PATH_FAILED with errno; PATH_REFUSED after a line on fd 2 (it climbs, or a link is in its way). */
int parent_directory(const char *path, enum follow follow, const struct files_owner *owner, const char **name);

/* `path` without a leading `/`, empty components and `.`; `into` has as many bytes as `path`. */
void plain_path(const char *path, char *into);

/* Opens the directory `name`, made if there is none; what else is there is replaced, but an old link to a directory is followed. */
int make_directory(int parent, const char *name, const struct files_owner *owner);

/* Marks a link that this call made; -1 past a million. */
int remember_link(const struct stat *status);

/* Makes what is open, or what lies at `name`, belong to `owner`: 0, or -1 with errno. */
int give(int fd, const struct files_owner *owner);
int give_name(int parent, const char *name, const struct files_owner *owner);

/* All of `size` bytes: 0, or -1 with errno. */
int write_fully(int fd, const void *bytes, size_t size);

/* Each writes one line to fd 2 and returns the exit code for it. `/path: reason`, 1: */
int complain(const char *path, const char *reason);
/* the reason being an errno, that errno: */
int complain_as(const char *path, int error);
/* `what: reason`, 1: */
int complain_of(const char *what, const char *reason);

#endif
