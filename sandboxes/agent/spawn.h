/* The processes that the agent starts. Each call has a supervisor: a fork of the agent that adopts whatever its command leaves behind
 * (PR_SET_CHILD_SUBREAPER), so that a call's processes are exactly the descendants of its supervisor, session leaders and daemons
 * included. It lives as long as any of them, and after that may take the next call: a fork less. */
#ifndef ROLLWAY_SPAWN_H
#define ROLLWAY_SPAWN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Where a lasting shell finds its control pipe and, if it has one, the file with its script: far above what scripts use. */
enum { CONTROL_FD = 250, SCRIPT_FD = 251 };

struct spawn {
    int kind; /* KIND_EXEC or KIND_SESSION: argv is executed; else files_main does the work */
    int argc;
    char **argv, **env;
    const char *user, *workdir;
    bool home_given; /* HOME was asked for; else a user's own is set */
    int in, out, err;
    int control, script; /* or -1 */
};

enum { KIND_EXEC, KIND_SESSION, KIND_PACK, KIND_UNPACK, KIND_READ, KIND_WRITE, KIND_COUNT };

enum how { HOW_EXITED, HOW_SIGNALLED, HOW_NOT_STARTED };

/* What a supervisor reports over its status socket: the first one says how the command ended, one with `idle` that all it left behind is
 * dead too. */
struct report {
    uint8_t how;
    uint8_t failed; /* 0, or the code of an ERROR: nothing was run */
    uint8_t no_workdir; /* not started since the working directory cannot be entered */
    uint8_t idle;
    int32_t code;
    uint64_t written; /* bytes to storage since the report before, by what the supervisor reaped */
};

/* Has a supervisor do it, the spare one where it can; its pid, or -1 with errno. `status` is the agent's end of its socket. The descriptors
 * in `spawn` stay the caller's to close. */
pid_t spawn_start(const struct spawn *spawn, int *status);

/* Raises the limit of open files for the agent itself; what it starts gets the old one. Once, at the start. */
void spawn_prepare(void);

#endif
