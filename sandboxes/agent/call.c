#define _GNU_SOURCE
#include "call.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "environment.h"
#include "link.h"
#include "memory.h"
#include "oom.h"
#include "result.h"
#include "session.h"

enum { CALLS_MAX = 1024, HELD_MAX = 64 * 1024 * 1024, PLACES = 256 };

static struct call *table[PLACES];
static struct call *live;
static uint32_t count, live_count;

static struct call **place(uint64_t id) {
    struct call **at = &table[(id ^ id >> 32) % PLACES];
    while (*at != NULL && (*at)->id != id)
        at = &(*at)->next;
    return at;
}

static void live_add(struct call *call) {
    call->live_next = live;
    if (live != NULL)
        live->live_previous = call;
    live = call;
    live_count++;
}

static void live_remove(struct call *call) {
    *(call->live_previous != NULL ? &call->live_previous->live_next : &live) = call->live_next;
    if (call->live_next != NULL)
        call->live_next->live_previous = call->live_previous;
    live_count--;
}

/* Frees what only a call that is not done needs. */
static void release_request(struct call *call) {
    run_free(&call->request);
    memory_resize(call->payload, call->payload_size, 0);
    call->payload = NULL;
    call->payload_size = 0;
    feed_close(&call->feed);
}

static void call_free(struct call *call) {
    *place(call->id) = call->next;
    count--;
    if (!call->done)
        live_remove(call);
    result_drop(call);
    release_request(call);
    capture_close(&call->out);
    capture_close(&call->err);
    loop_free_later(call);
}

uint32_t calls_alive(void) { return live_count; }

uint32_t calls_kept(void) { return count - live_count; }

struct job *call_start_job(const struct run_request *request, source_handler *control, int script_fd) {
    struct run_request complete = *request;
    bool home_given;
    char **env = environment_for(&request->env, &home_given);
    if (env == NULL)
        return NULL;
    if (*complete.user == '\0')
        complete.user = (char *)environment_user();
    if (*complete.workdir == '\0')
        complete.workdir = (char *)environment_workdir();
    struct job *job = job_start(&complete, env, home_given, control, script_fd);
    int reason = errno;
    free(env);
    errno = reason;
    return job;
}

static struct call *call_make(uint64_t id, bool durable, const struct run_request *request) {
    struct call *call = calloc(1, sizeof *call);
    if (call == NULL)
        return NULL;
    call->id = id;
    call->durable = durable;
    call->kind = request->kind;
    call->begun_us = now_us();
    call->deadline_us = request->timeout_ms == 0 ? 0 : call->begun_us + (int64_t)request->timeout_ms * 1000;
    call->flood = request->flood;
    call->credit = DATA_WINDOW;
    call->oom_before = oom_kills();
    feed_open(&call->feed);
    capture_open(&call->out, request->cap);
    capture_open(&call->err, request->cap);
    call->next = NULL;
    *place(id) = call;
    count++;
    live_add(call);
    return call;
}

/* A session's call may have to wait: it keeps its own copy of what it asks for. */
static int begin_session(struct call *call, const uint8_t *payload, size_t length) {
    call->payload = memory_resize(NULL, 0, length);
    if (call->payload == NULL)
        return ERROR_FULL;
    call->payload_size = length;
    memcpy(call->payload, payload, length);
    int refused = run_decode(&call->request, call->payload, length);
    return refused != 0 ? refused : session_run(call);
}

static int begin_process(struct call *call, const struct run_request *request) {
    struct job *job = call_start_job(request, NULL, -1);
    if (job == NULL)
        return ERROR_NO_PROCESS;
    call->job = job;
    job->call = call;
    job->call_id = call->id;
    return 0;
}

static int call_begin(uint64_t id, bool durable, uint8_t *payload, size_t length) {
    struct run_request request;
    if (count >= CALLS_MAX || memory_held() >= HELD_MAX)
        return ERROR_FULL;
    int refused = run_decode(&request, payload, length);
    if (refused != 0)
        return refused;
    struct call *call = call_make(id, durable, &request);
    if (call == NULL)
        refused = ERROR_FULL;
    else if (request.kind == KIND_SESSION)
        refused = begin_session(call, payload, length);
    else
        refused = begin_process(call, &request);
    run_free(&request);
    if (refused != 0 && call != NULL)
        call_free(call);
    return refused;
}

static void send_allowed(struct call *call) {
    uint8_t bytes[8];
    call->feed.allowed = call->feed.written + STDIN_WINDOW;
    put64(bytes, call->feed.allowed);
    attacher_send(GIVEN, call->id, bytes, sizeof bytes);
}

int call_run(uint64_t id, bool durable, uint8_t *payload, size_t length) {
    struct call *call = *place(id);
    if (call == NULL)
        return call_begin(id, durable, payload, length);
    call->forgotten = false;
    if (call->done) {
        result_send(call);
        return 0;
    }
    call->credit = DATA_WINDOW;
    if (!call->feed.ended && call->kind != KIND_SESSION)
        send_allowed(call);
    return 0;
}

static struct source *stdin_of(struct call *call) { return call->job != NULL && call->kind != KIND_SESSION ? &call->job->in : NULL; }

void call_feed(struct call *call) {
    feed_write(&call->feed, stdin_of(call));
    if (!call->feed.ended && call->feed.written + STDIN_WINDOW - call->feed.allowed >= STDIN_WINDOW / 4)
        send_allowed(call);
}

int call_stdin(uint64_t id, const uint8_t *payload, uint32_t length) {
    struct call *call = *place(id);
    if (length < 8)
        return ERROR_BAD_REQUEST;
    if (call == NULL || call->done || call->kind == KIND_SESSION) /* it ended meanwhile: nobody reads any more */
        return 0;
    if (!feed_add(&call->feed, get64(payload), payload + 8, length - 8, stdin_of(call)))
        return ERROR_BAD_REQUEST;
    call_feed(call);
    return 0;
}

int call_credit(uint64_t id, uint32_t bytes) {
    struct call *call = *place(id);
    if (call == NULL)
        return 0;
    call->credit += bytes;
    if (call->data_waits)
        call_data_ready(call);
    return 0;
}

/* Ends a call that still runs or waits; its result follows when everything it started is dead. */
static void call_end(struct call *call, uint8_t flag) {
    call->flags |= flag;
    if (call->waiting) {
        session_drop(call);
        call_finish(call, &(struct report){.how = HOW_SIGNALLED, .code = 9});
    } else if (call->job != NULL) {
        job_kill(call->job);
    }
}

int call_kill(uint64_t id) {
    struct call *call = *place(id);
    if (call == NULL)
        return ERROR_UNKNOWN;
    if (!call->done) {
        call_end(call, ENDED_KILLED);
        return 0;
    }
    for (struct job *job = job_of_call(id); job != NULL && !job->killing; job = job_of_call(id))
        job_kill(job);
    result_send(call);
    return 0;
}

void call_forget(uint64_t id) {
    struct call *call = *place(id);
    if (call == NULL)
        return;
    call->forgotten = true;
    if (call->done)
        call_free(call);
}

void calls_taken_over(void) {
    results_drop_all();
    for (size_t i = 0; i < PLACES; i++)
        for (struct call *call = table[i], *next; call != NULL; call = next) {
            next = call->next;
            if (call->durable)
                continue;
            call->forgotten = true;
            if (call->done)
                call_free(call);
            else
                call_end(call, ENDED_KILLED);
        }
}

void calls_mark_all(uint8_t flag) {
    for (struct call *call = live, *next; call != NULL; call = next) {
        next = call->live_next;
        if (call->waiting)
            call_end(call, flag);
        else
            call->flags |= flag;
    }
}

void call_printed(struct call *call, bool is_err, const uint8_t *bytes, size_t length) {
    capture_add(is_err ? &call->err : &call->out, bytes, length);
    bool flooded = call->flood != 0 && call->out.printed + call->err.printed > call->flood;
    if (flooded && call->job != NULL && !call->job->killing)
        call_end(call, ENDED_FLOODED);
}

/* Moves data as far as the attacher's window and its link allow. What it waits for calls again: the pipe, CREDIT, or calls_pump. */
void call_data_ready(struct call *call) {
    struct source *out = &call->job->out;
    for (;;) {
        uint8_t *at = out->fd >= 0 && call->credit > 0 ? attacher_space() : NULL;
        call->data_waits = at == NULL && out->fd >= 0;
        if (at == NULL) {
            source_want(out, 0);
            return;
        }
        ssize_t got = job_read(out, at, call->credit < PAYLOAD_MAX ? (size_t)call->credit : PAYLOAD_MAX);
        if (got < 0) {
            source_want(out, EPOLLIN);
            return;
        }
        if (got == 0) {
            source_close(out);
            if (call->job->reported && !call->job->killing)
                call_reported(call, &call->job->report);
            return;
        }
        call->credit -= (uint64_t)got;
        call->out.printed += (uint64_t)got;
        attacher_commit(DATA, 0, call->id, (uint32_t)got);
    }
}

void call_reported(struct call *call, const struct report *report) {
    bool moves_data = call->kind == KIND_PACK || call->kind == KIND_READ;
    if (moves_data && call->job->out.fd >= 0 && report->failed == 0)
        return; /* the rest of the data goes first */
    call_dead(call, report);
}

void call_dead(struct call *call, const struct report *report) {
    if (report->failed != 0)
        call_fail(call, report->failed, strerror(report->code));
    else
        call_finish(call, report);
}

/* Parts from its process: what that left behind goes on alone. */
static void part(struct call *call) {
    struct job *job = call->job;
    call->job = NULL;
    if (job != NULL && job->call == call && call->kind != KIND_SESSION)
        job_leave(job);
    call->data_waits = false;
}

void call_finish(struct call *call, const struct report *report) {
    part(call);
    call->how = report->how;
    call->flags |= report->no_workdir ? ENDED_NO_WORKDIR : 0;
    call->code = report->code;
    call->wall_us = now_us() - call->begun_us;
    if (oom_kills() > call->oom_before)
        call->flags |= ENDED_OOM;
    call->done = true;
    live_remove(call);
    release_request(call);
    if (call->forgotten)
        call_free(call);
    else
        result_send(call);
}

void call_fail(struct call *call, uint16_t code, const char *text) {
    uint8_t payload[2 + 128];
    size_t length = strnlen(text, 128);
    part(call);
    put16(payload, code);
    memcpy(payload + 2, text, length);
    if (!call->forgotten)
        attacher_send(ERROR, call->id, payload, (uint32_t)(2 + length));
    call_free(call);
}

void calls_pump(void) {
    results_pump();
    for (struct call *call = live, *next; call != NULL; call = next) {
        next = call->live_next;
        if (call->data_waits && call->credit > 0 && !call->job->killing)
            call_data_ready(call);
    }
}

static bool on_the_clock(const struct call *call) { return call->deadline_us != 0 && (call->job == NULL || !call->job->killing); }

void calls_tick(int64_t now) {
    for (struct call *call = live, *next; call != NULL; call = next) {
        next = call->live_next;
        if (on_the_clock(call) && call->deadline_us <= now)
            call_end(call, ENDED_TIMED_OUT);
    }
}

int64_t calls_deadline(void) {
    int64_t first = 0;
    for (struct call *call = live; call != NULL; call = call->live_next)
        if (on_the_clock(call))
            first = earlier(first, call->deadline_us);
    return first;
}
