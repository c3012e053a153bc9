/* Calls: what attachers asked for, by id, until they say FORGET. */
#ifndef ROLLWAY_CALL_H
#define ROLLWAY_CALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "capture.h"
#include "feed.h"
#include "frame.h"
#include "job.h"
#include "request.h"

enum { DATA_WINDOW = 1048576 };

enum ended {
    ENDED_TIMED_OUT = 1,
    ENDED_KILLED = 2,
    ENDED_OOM = 4,
    ENDED_DISK_FULL = 8,
    ENDED_FLOODED = 16,
    ENDED_SESSION = 32,
    ENDED_NO_WORKDIR = 64,
};

struct call {
    uint64_t id;
    struct call *next;              /* of the same place in the table */
    struct call *live_next, *live_previous; /* of those not done yet */
    struct call *out_next;          /* of those whose result is being sent */
    struct call *session_next;      /* of those that wait for the same shell */
    struct job *job;
    struct session *session;
    struct run_request request;     /* of one that waits; points into `payload` */
    uint8_t *payload;
    size_t payload_size;
    uint8_t kind, flags, how;
    bool durable, forgotten, done, waiting, sending, data_waits;
    int32_t code;
    int64_t begun_us, wall_us, deadline_us;
    uint64_t oom_before, flood, credit;
    size_t sent;
    struct feed feed;
    struct capture out, err;
};

/* What frames ask for. `answer` gets the codes of ERROR: each of these returns 0 or such a code. */
int call_run(uint64_t id, bool durable, uint8_t *payload, size_t length);
int call_stdin(uint64_t id, const uint8_t *payload, uint32_t length);
int call_credit(uint64_t id, uint32_t bytes);
int call_kill(uint64_t id);
void call_forget(uint64_t id);
/* Another attacher took over: what was the last one's alone ends. */
void calls_taken_over(void);
/* Ends every call with this flag. Jobs are killed by the caller. */
void calls_mark_all(uint8_t flag);

uint32_t calls_alive(void);
uint32_t calls_kept(void);

/* From jobs and sessions. */
void call_printed(struct call *call, bool is_err, const uint8_t *bytes, size_t count);
void call_data_ready(struct call *call);
/* The process ended, or could not be started. */
void call_reported(struct call *call, const struct report *report);
/* ... and everything it started is dead. */
void call_dead(struct call *call, const struct report *report);
void call_finish(struct call *call, const struct report *report);
/* Nothing was run: ERROR, and it is forgotten. */
void call_fail(struct call *call, uint16_t code, const char *text);

/* Starts the process of a call, or of the shell it needs. The environment is made of the agent's, the configured and the call's. */
struct job *call_start_job(const struct run_request *request, source_handler *control, int script_fd);
/* The pipe to stdin takes more. */
void call_feed(struct call *call);

/* Sends what the attacher has room for. */
void calls_pump(void);
/* Ends what ran out of time; when the next one does, or 0. */
void calls_tick(int64_t now);
int64_t calls_deadline(void);

#endif
