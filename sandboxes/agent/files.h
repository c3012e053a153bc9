/* The kinds of calls that move files: pack, unpack, read, write. Each runs in a forked child of the agent that executes no program of
 * the image: what the image holds, or lacks, changes nothing. Blocking I/O on fds 0, 1 and 2; one clear line on fd 2 says what went
 * wrong (`/work/x: is a directory`).
 *
 * What always holds: no FIFO, device or socket is ever opened, so nothing hangs but the pipes; no link is followed at the end of a path;
 * memory and open files have bounds that do not depend on what the sandbox holds or sends. */
#ifndef ROLLWAY_FILES_H
#define ROLLWAY_FILES_H

#include <sys/types.h>

/* As on the wire (PROTOCOL.md, RUN). */
enum files_kind { FILES_PACK = 2, FILES_UNPACK = 3, FILES_READ = 4, FILES_WRITE = 5 };

/* Whom new files and directories belong to: the sandbox's user. */
struct files_owner {
    uid_t uid;
    gid_t gid;
};

/* Does one call of `kind` and returns its exit code: 0, or after a line on fd 2 the errno that explains it, 1 where there is none.
 *
 * argv: `argc` strings, no program name before them. pack: paths; unpack: paths to remove first, may be none; read: a path; write: a path
 * and an octal mode. A path that is not absolute counts from `/`; one with a `..` is an error.
 *
 * Call it in the child after fork, with fds 0 to 2 in place and the signal mask empty; then `_exit` with what it returns. It changes the
 * umask and SIGPIPE of its process, and may use malloc (so fork from a process whose other threads never hold malloc's lock: watch.h's
 * thread never allocates). */
int files_main(int kind, int argc, char **argv, const struct files_owner *owner);

#endif
