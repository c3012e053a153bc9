/* A supervisor and its pipes, from the agent's side: what one call, or one lasting shell, runs as. It outlives its call while anything that
 * the call left behind lives: what that prints is read to nowhere then, so that no server dies of a closed pipe. */
#ifndef ROLLWAY_JOB_H
#define ROLLWAY_JOB_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "loop.h"
#include "request.h"
#include "spawn.h"

struct call;
struct session;

struct job {
    struct job *next, *previous;
    pid_t pid;
    int kind;
    uint64_t call_id;        /* of the call that it was started for; 0 of a session */
    struct call *call;       /* who gets what is printed and hears of the end; NULL: nobody any more */
    struct session *session; /* of a lasting shell, until it ended */
    struct source status, in, out, err, control;
    bool reported, killing;
    bool reaped; /* its process is gone, and the rest of its data still on the way */
    struct report report;
    int64_t kill_again_us, kill_pause_us;
};

/* Starts what `request` asks for. `env` ends with NULL and has a free place. NULL when no process or pipe could be had (errno). */
struct job *job_start(const struct run_request *request, char **env, bool home_given, source_handler *control, int script_fd);

/* Kills all that descends from the job; it ends when all of it is dead. */
void job_kill(struct job *job);
/* Leaves the job to itself: nobody listens any more. */
void job_leave(struct job *job);
/* Takes what lies in the output pipes right now. */
void job_drain(struct job *job);
/* Stops reading the pipe of `source` for good where it is at its end; bytes read into `at`, or -1 when there is nothing now. */
ssize_t job_read(struct source *source, uint8_t *at, size_t count);

struct job *job_of_call(uint64_t call_id);
bool jobs_alive(void);
/* How many processes live that calls started: shells, commands, and what these left behind. */
uint32_t jobs_processes(void);

/* Kills every job and every stray; `jobs_all_dead` says when that is done. What is started meanwhile is not touched. */
void jobs_kill_all(void);
bool jobs_all_dead(void);

/* After SIGCHLD. */
void jobs_reap(void);
/* Kills again what is not dead yet; when that is due next, or 0. */
void jobs_tick(int64_t now);
int64_t jobs_deadline(void);

#endif
