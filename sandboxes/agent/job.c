#define _GNU_SOURCE
#include "job.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "call.h"
#include "memory.h"
#include "session.h"
#include "spare.h"
#include "tree.h"
#include "watch.h"

enum {
    SCRATCH_BYTES = 65536,
    DRAIN_BYTES = 1048576, /* the most that a pipe of the sandbox can hold */
    PIPE_BYTES = 1048576,
    LEFT_MAX = 128, /* of so many jobs whose call is over the pipes stay open */
    KILL_PAUSE_US = 10000,
    KILL_PAUSE_MAX_US = 500000,
};

static struct job *first, *last;
static bool strays_expected;
static int64_t strays_again_us;

static void job_link(struct job *job) {
    job->previous = last;
    if (last != NULL)
        last->next = job;
    else
        first = job;
    last = job;
}

static void job_unlink(struct job *job) {
    *(job->previous != NULL ? &job->previous->next : &first) = job->next;
    *(job->next != NULL ? &job->next->previous : &last) = job->previous;
}

static bool is_supervisor(pid_t pid) {
    if (spare_is(pid))
        return true;
    for (struct job *job = first; job != NULL; job = job->next)
        if (job->pid == pid)
            return true;
    return false;
}

static bool is_left(const struct job *job) { return job->call == NULL && job->session == NULL && (job->out.fd >= 0 || job->err.fd >= 0); }

static void close_pipes(struct job *job) {
    source_close(&job->in);
    source_close(&job->out);
    source_close(&job->err);
    source_close(&job->control);
}

static void job_free(struct job *job) {
    close_pipes(job);
    source_close(&job->status);
    job_unlink(job);
    loop_free_later(job);
}

ssize_t job_read(struct source *source, uint8_t *at, size_t count) {
    ssize_t got = read(source->fd, at, count);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return -1;
    if (got > 0)
        return got;
    return 0;
}

/* Reads once; false when there is nothing more for now. */
static bool take_output(struct job *job, struct source *source) {
    static uint8_t *scratch;
    if (scratch == NULL)
        scratch = memory_fixed(SCRATCH_BYTES, false);
    ssize_t count = source->fd >= 0 ? job_read(source, scratch, SCRATCH_BYTES) : -1;
    if (count < 0)
        return false;
    if (count == 0) {
        source_close(source);
        return false;
    }
    if (job->call != NULL)
        call_printed(job->call, source == &job->err, scratch, (size_t)count);
    return true;
}

static bool moves_data(const struct job *job) { return job->kind == KIND_PACK || job->kind == KIND_READ; }

static void out_ready(struct source *source, uint32_t events) {
    struct job *job = owner_of(source, struct job, out);
    (void)events;
    if (job->call != NULL && moves_data(job))
        call_data_ready(job->call);
    else
        take_output(job, source);
}

static void err_ready(struct source *source, uint32_t events) {
    (void)events;
    take_output(owner_of(source, struct job, err), source);
}

static void drain(struct job *job, struct source *source) {
    for (size_t bytes = 0; bytes < DRAIN_BYTES && take_output(job, source); bytes += SCRATCH_BYTES)
        ;
}

void job_drain(struct job *job) {
    if (!moves_data(job))
        drain(job, &job->out);
    drain(job, &job->err);
}

static void in_ready(struct source *source, uint32_t events) {
    struct job *job = owner_of(source, struct job, in);
    (void)events;
    if (job->session != NULL)
        session_feed(job->session);
    else if (job->call != NULL)
        call_feed(job->call);
    else
        source_close(source);
}

/* The next report; the first one is the one that counts. False when none is there, at the end too. */
static bool read_report(struct job *job, bool *idle) {
    struct report said;
    if (job->status.fd < 0 || recv(job->status.fd, &said, sizeof said, MSG_DONTWAIT) != sizeof said)
        return false;
    if (!job->reported)
        job->report = said;
    job->reported = true;
    *idle = said.idle;
    watch_wrote(said.written);
    return true;
}

static void job_reaped(struct job *job, int status);

/* All that it started is dead, and its supervisor waits for more. One that a kill is under way to may not live to do it. */
static void job_idle(struct job *job) {
    int socket = job->killing ? -1 : source_take(&job->status);
    pid_t pid = job->pid;
    job_reaped(job, 0);
    if (socket >= 0)
        spare_keep(pid, socket);
}

static void status_ready(struct source *source, uint32_t events) {
    struct job *job = owner_of(source, struct job, status);
    bool first = !job->reported, idle = false;
    (void)events;
    if (!read_report(job, &idle)) {
        source_want(source, 0); /* the supervisor is gone; SIGCHLD follows */
        return;
    }
    if (first && !job->killing) {
        job_drain(job);
        if (job->session != NULL)
            session_shell_ended(job->session);
        else if (job->call != NULL)
            call_reported(job->call, &job->report);
    }
    if (idle)
        job_idle(job);
}

void job_leave(struct job *job) {
    uint32_t left = 0;
    job->call = NULL;
    job->session = NULL;
    source_close(&job->in);
    source_close(&job->control);
    if (job->reaped) {
        job_free(job);
        return;
    }
    source_want(&job->out, EPOLLIN);
    struct job *oldest = NULL;
    for (struct job *each = last; each != NULL; each = each->previous)
        if (is_left(each)) {
            left++;
            oldest = each;
        }
    if (left > LEFT_MAX)
        close_pipes(oldest);
}

struct pipes {
    int in[2], out[2], err[2], control[2];
};

static void close_pair(int pair[2], int which) {
    if (pair[which] >= 0)
        close(pair[which]);
}

static void close_side(struct pipes *pipes, bool ours) {
    close_pair(pipes->in, ours);
    close_pair(pipes->out, !ours);
    close_pair(pipes->err, !ours);
    close_pair(pipes->control, !ours);
}

static bool make_pipes(struct pipes *pipes, bool control) {
    *pipes = (struct pipes){{-1, -1}, {-1, -1}, {-1, -1}, {-1, -1}};
    if (pipe2(pipes->in, O_CLOEXEC) == 0 && pipe2(pipes->out, O_CLOEXEC) == 0 && pipe2(pipes->err, O_CLOEXEC) == 0 &&
        (!control || pipe2(pipes->control, O_CLOEXEC) == 0))
        return true;
    int reason = errno;
    close_side(pipes, true);
    close_side(pipes, false);
    errno = reason;
    return false;
}

static bool watch(struct source *source, int fd, uint32_t events, source_handler *ready) {
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return source_open(source, fd, events, ready) == 0;
}

static void watch_pipes(struct job *job, const struct pipes *pipes, int status, source_handler *control) {
    job->control.fd = -1;
    watch(&job->in, pipes->in[1], 0, in_ready); /* what cannot be watched is closed: the call ends by its time, or its process */
    watch(&job->out, pipes->out[0], EPOLLIN, out_ready);
    watch(&job->err, pipes->err[0], EPOLLIN, err_ready);
    source_open(&job->status, status, EPOLLIN, status_ready);
    if (control != NULL)
        watch(&job->control, pipes->control[0], EPOLLIN, control);
    if (job->kind >= KIND_PACK) { /* many bytes pass: fewer turns */
        fcntl(job->in.fd, F_SETPIPE_SZ, PIPE_BYTES);
        fcntl(job->out.fd, F_SETPIPE_SZ, PIPE_BYTES);
    }
}

struct job *job_start(const struct run_request *request, char **env, bool home_given, source_handler *control, int script_fd) {
    struct pipes pipes;
    struct job *job = calloc(1, sizeof *job);
    if (job == NULL || !make_pipes(&pipes, control != NULL)) {
        free(job);
        return NULL;
    }
    struct spawn spawn = {
        .kind = request->kind,
        .argc = (int)request->argv.count,
        .argv = request->argv.items,
        .env = env,
        .user = request->user,
        .workdir = request->workdir,
        .home_given = home_given,
        .in = pipes.in[0],
        .out = pipes.out[1],
        .err = pipes.err[1],
        .control = pipes.control[1],
        .script = script_fd,
    };
    job->kind = request->kind;
    int status = -1;
    job->pid = spawn_start(&spawn, &status);
    int reason = errno;
    close_side(&pipes, false);
    if (job->pid < 0) {
        close_side(&pipes, true);
        free(job);
        errno = reason;
        return NULL;
    }
    watch_pipes(job, &pipes, status, control);
    job_link(job);
    return job;
}

/* A supervisor that the sandbox stopped cannot reap: it goes on. One that has nothing left to reap and still does not end is ended. */
static void kill_once(struct job *job) {
    if (job->pid <= 0)
        return;
    if (job->kind >= KIND_PACK) {
        kill(job->pid, SIGKILL);
        return;
    }
    bool again = job->kill_again_us != 0;
    size_t alive = tree_kill(job->pid, is_supervisor);
    kill(job->pid, alive == 0 && again ? SIGKILL : SIGCONT);
}

static void plan_kill(struct job *job) {
    job->killing = true;
    job->kill_pause_us = job->kill_pause_us == 0 ? KILL_PAUSE_US : job->kill_pause_us * 2;
    if (job->kill_pause_us > KILL_PAUSE_MAX_US)
        job->kill_pause_us = KILL_PAUSE_MAX_US;
    job->kill_again_us = now_us() + job->kill_pause_us;
}

void job_kill(struct job *job) {
    if (job->killing)
        return;
    if (job->reaped) {
        call_dead(job->call, &job->report);
        return;
    }
    kill_once(job);
    plan_kill(job);
}

struct job *job_of_call(uint64_t call_id) {
    for (struct job *job = last; job != NULL; job = job->previous)
        if (job->call_id == call_id)
            return job;
    return NULL;
}

bool jobs_alive(void) { return first != NULL || strays_expected; }

uint32_t jobs_processes(void) { return (uint32_t)tree_count(getpid(), is_supervisor); }

/* What was adopted from supervisors that the sandbox's own commands killed. */
static void kill_strays(void) {
    strays_expected = tree_kill(getpid(), is_supervisor) > 0;
    strays_again_us = now_us() + KILL_PAUSE_US;
}

void jobs_kill_all(void) {
    bool at_once = getpid() == 1;
    spare_drop();
    if (at_once)
        kill(-1, SIGKILL);
    for (struct job *job = first; job != NULL; job = job->next)
        if (at_once && !job->reaped)
            plan_kill(job);
        else
            job_kill(job);
    kill_strays();
}

bool jobs_all_dead(void) {
    for (struct job *job = first; job != NULL; job = job->next)
        if (job->killing)
            return false;
    return !strays_expected;
}

static void job_reaped(struct job *job, int status) {
    bool idle;
    if (!job->reported && !read_report(job, &idle)) {
        if (WIFSIGNALED(status))
            job->report = (struct report){.how = HOW_SIGNALLED, .code = WTERMSIG(status)};
        else
            job->report = (struct report){.how = HOW_NOT_STARTED, .failed = ERROR_NO_PROCESS, .code = EMFILE};
    }
    if (WIFSIGNALED(status) && job->kind < KIND_PACK)
        strays_expected = true;
    job_drain(job);
    job->pid = -1;
    if (moves_data(job) && job->call != NULL && job->out.fd >= 0 && !job->killing && WIFEXITED(status)) {
        job->reaped = true; /* call_data_ready goes on to the end of the pipe */
        return;
    }
    struct call *call = job->call;
    struct session *session = job->session;
    struct report report = job->report;
    if (session != NULL)
        session_dead(session);
    else if (call != NULL)
        call_dead(call, &report);
    job_free(job);
}

void jobs_reap(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        spare_reaped(pid);
        for (struct job *job = first; job != NULL; job = job->next)
            if (job->pid == pid) {
                job_reaped(job, status);
                break;
            }
    }
    if (strays_expected)
        kill_strays();
}

void jobs_tick(int64_t now) {
    spare_tick(now);
    if (strays_expected && strays_again_us <= now)
        kill_strays();
    for (struct job *job = first; job != NULL; job = job->next)
        if (job->killing && job->kill_again_us <= now) {
            kill_once(job);
            plan_kill(job);
        }
}

int64_t jobs_deadline(void) {
    int64_t next = earlier(spare_deadline(), strays_expected ? strays_again_us : 0);
    for (struct job *job = first; job != NULL; job = job->next)
        if (job->killing)
            next = earlier(next, job->kill_again_us);
    return next;
}
