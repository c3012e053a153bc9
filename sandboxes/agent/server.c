#define _GNU_SOURCE
#include "server.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "call.h"
#include "environment.h"
#include "harden.h"
#include "loop.h"
#include "message.h"
#include "oom.h"
#include "user.h"
#include "watch.h"

enum { BOOT_ID_BYTES = 16, FENCED_MAX = 16, DONE_MAX = 16 };

static uint8_t boot_id[BOOT_ID_BYTES];
static uint32_t features;
static uint64_t fence;

/* Channels that were told that they are fenced. */
static uint64_t fenced[FENCED_MAX];
static size_t fenced_next;

/* KILL_ALLs to be answered when all are dead. */
static uint64_t done_calls[DONE_MAX];
static size_t done_count;

static struct source watch_source = {.fd = -1};

void server_open(uint32_t known_features) {
    features = known_features;
    if (getrandom(boot_id, sizeof boot_id, 0) != sizeof boot_id) {
        perror("rollway agent: no random boot id");
        exit(70);
    }
}

static void answer_error(struct link *link, const struct frame *frame, int code, const char *text) {
    uint8_t payload[2 + 256];
    size_t length = strnlen(text, 256);
    put16(payload, (uint16_t)code);
    memcpy(payload + 2, text, length);
    link_answer(link, frame, ERROR, payload, (uint32_t)(2 + length));
}

static const char *refusal_text(int code) {
    switch (code) {
    case ERROR_UNKNOWN:
        return "no such call";
    case ERROR_FULL:
        return "too many calls or results are kept: forget some";
    case ERROR_NO_PROCESS:
        return strerror(errno);
    case ERROR_TOO_LARGE:
        return "too many arguments, too large an environment, or a message of more than 4 MiB";
    default:
        return "not a request that this agent understands";
    }
}

static void refuse(struct link *link, const struct frame *frame, int code) {
    if (code != 0)
        answer_error(link, frame, code, refusal_text(code));
}

static void tell_fenced(struct link *link, const struct frame *frame) {
    uint8_t payload[8];
    for (size_t i = 0; i < FENCED_MAX; i++)
        if (fenced[i] == frame->channel && frame->type != HELLO)
            return;
    fenced[fenced_next++ % FENCED_MAX] = frame->channel;
    put64(payload, fence);
    link_answer(link, frame, FENCED, payload, sizeof payload);
}

static void forget_fenced(uint64_t channel) {
    for (size_t i = 0; i < FENCED_MAX; i++)
        if (fenced[i] == channel)
            fenced[i] = 0;
}

/* Who waits for a call that goes on without it learns at once that it waits in vain. */
static void tell_taken_over(uint64_t by) {
    uint8_t payload[8];
    uint64_t before = attacher_channel();
    if (before == 0 || before == by)
        return;
    fenced[fenced_next++ % FENCED_MAX] = before;
    put64(payload, fence);
    attacher_send(FENCED, 0, payload, sizeof payload);
}

static void hello(struct link *link, const struct frame *frame) {
    if (frame->length != 10 || frame->channel == 0)
        return;
    uint64_t offered = get64(frame->payload + 2);
    if (offered < fence) {
        tell_fenced(link, frame);
        return;
    }
    fence = offered;
    forget_fenced(frame->channel);
    tell_taken_over(frame->channel);
    if (attach(link, frame->channel)) {
        messages_drop();
        calls_taken_over();
    }
    uint8_t payload[2 + BOOT_ID_BYTES + 12];
    put16(payload, VERSION);
    memcpy(payload + 2, boot_id, sizeof boot_id);
    put64(payload + 2 + BOOT_ID_BYTES, fence);
    put32(payload + 10 + BOOT_ID_BYTES, features);
    link_answer(link, frame, WELCOME, payload, sizeof payload);
}

static void run(struct link *link, const struct frame *frame) {
    uint8_t *bytes;
    size_t length;
    int whole = message_add(frame, &bytes, &length);
    if (whole < 0)
        refuse(link, frame, -whole);
    else if (whole > 0)
        refuse(link, frame, frame->call == 0 ? ERROR_BAD_REQUEST : call_run(frame->call, frame->flags & FLAG_DURABLE, bytes, length));
    message_done();
}

static bool is_empty(const char *path) {
    DIR *directory = opendir(path);
    struct dirent *entry;
    if (directory == NULL)
        return false;
    while ((entry = readdir(directory)) != NULL && (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0))
        continue;
    closedir(directory);
    return entry == NULL;
}

/* Makes a directory and those above it. The last one belongs to the user where it is new, or still empty and root's: a mount, or the image's. */
static int make_workdir(char *path, const struct user *user) {
    struct stat about;
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0755);
        *slash = '/';
    }
    if (mkdir(path, 0755) == 0)
        return chown(path, user->uid, user->gid);
    int reason = errno;
    if (lstat(path, &about) == 0 && S_ISDIR(about.st_mode) && about.st_uid == 0 && user->uid != 0 && is_empty(path))
        return chown(path, user->uid, user->gid);
    if (stat(path, &about) == 0 && S_ISDIR(about.st_mode))
        return 0;
    errno = reason;
    return -1;
}

static void disk_full(struct source *source, uint32_t events) {
    (void)source;
    (void)events;
    if (!watch_tripped())
        return;
    calls_mark_all(ENDED_DISK_FULL);
    jobs_kill_all();
}

static bool start_watch(const struct configure_request *request) {
    int fd = watch_configure(request->disk_mib, request->inodes);
    if (fd == -2 || fd == watch_source.fd)
        return true;
    return fd >= 0 && source_open(&watch_source, fd, EPOLLIN, disk_full) == 0;
}

static void configure_with(struct link *link, const struct frame *frame, const struct configure_request *request) {
    static struct user user;
    if (!user_find(&user, request->user))
        answer_error(link, frame, ERROR_NO_USER, request->user);
    else if (*request->workdir != '\0' && (*request->workdir != '/' || make_workdir(request->workdir, &user) != 0))
        answer_error(link, frame, ERROR_BAD_REQUEST, *request->workdir == '/' ? strerror(errno) : "the workdir is not absolute");
    else if (!start_watch(request))
        answer_error(link, frame, ERROR_NO_PROCESS, strerror(errno));
    else if (environment_configure(request) != 0)
        refuse(link, frame, ERROR_FULL);
    else
        link_answer(link, frame, DONE, NULL, 0);
}

static void configure(struct link *link, const struct frame *frame) {
    struct configure_request request;
    uint8_t *bytes;
    size_t length;
    int whole = message_add(frame, &bytes, &length);
    int refused = whole < 0 ? -whole : whole > 0 ? configure_decode(&request, bytes, length) : 0;
    refuse(link, frame, refused);
    if (whole > 0 && refused == 0) {
        configure_with(link, frame, &request);
        configure_free(&request);
    }
    message_done();
}

static void kill_all(struct link *link, const struct frame *frame) {
    if (done_count == DONE_MAX) {
        refuse(link, frame, ERROR_FULL);
        return;
    }
    done_calls[done_count++] = frame->call;
    calls_mark_all(ENDED_KILLED);
    jobs_kill_all();
}

static void pong(struct link *link, const struct frame *frame) {
    uint8_t payload[36];
    uint64_t bytes = 0, inodes = 0;
    watch_used(&bytes, &inodes);
    put64(payload, oom_kills());
    put64(payload + 8, bytes);
    put64(payload + 16, inodes);
    put32(payload + 24, calls_alive());
    put32(payload + 28, calls_kept());
    put32(payload + 32, jobs_processes());
    link_answer(link, frame, PONG, payload, sizeof payload);
}

static void forget(const struct frame *frame) {
    for (uint32_t at = 0; at + 8 <= frame->length; at += 8)
        call_forget(get64(frame->payload + at));
}

static void handle(struct link *link, const struct frame *frame) {
    switch (frame->type) {
    case RUN:
        run(link, frame);
        break;
    case STDIN:
        refuse(link, frame, call_stdin(frame->call, frame->payload, frame->length));
        break;
    case CREDIT:
        refuse(link, frame, frame->length == 4 ? call_credit(frame->call, get32(frame->payload)) : ERROR_BAD_REQUEST);
        break;
    case KILL:
        refuse(link, frame, call_kill(frame->call));
        break;
    case FORGET:
        forget(frame);
        break;
    case KILL_ALL:
        kill_all(link, frame);
        break;
    case PING:
        pong(link, frame);
        break;
    case CONFIGURE:
        configure(link, frame);
        break;
    default:
        refuse(link, frame, ERROR_BAD_REQUEST);
    }
}

void server_handle(struct link *link, const struct frame *frame) {
    if (frame->type == HELLO)
        hello(link, frame);
    else if (attached(link, frame->channel))
        handle(link, frame);
    else
        tell_fenced(link, frame);
}

void server_turn(void) {
    watch_active(jobs_alive());
    if (done_count > 0 && jobs_all_dead())
        while (done_count > 0)
            attacher_send(DONE, done_calls[--done_count], NULL, 0);
    calls_pump();
}
