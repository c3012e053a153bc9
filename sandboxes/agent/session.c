#define _GNU_SOURCE
#include "session.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "memory.h"

enum { LINE_BYTES = 256, NONCE_CHARACTERS = 32 };

/* How this shell reaches the control pipe: dash knows no descriptor of two digits, but opens any path. */
enum reach { REACH_UNKNOWN, REACH_DESCRIPTOR, REACH_PATH };

/* Bytes on their way to a shell. */
struct text {
    char *bytes;
    size_t size, start, length;
};

struct session {
    struct session *next;
    char *name;
    struct job *job;
    struct call *running, *waiting; /* waiting: a queue */
    enum reach reach;
    bool traced, verbose; /* `set -x`, `set -v`: put back within each script, so that what we write is not traced */
    char nonce[NONCE_CHARACTERS + 1];
    char line[LINE_BYTES];
    size_t line_length;
    struct text unread; /* what the shell has not read yet */
    int script_fd; /* bash's scripts lie in a file: from a pipe it reads byte by byte. -1: none */
};

static struct session *sessions;

static struct session *find(const char *name) {
    for (struct session *session = sessions; session != NULL; session = session->next)
        if (strcmp(session->name, name) == 0)
            return session;
    return NULL;
}

static void text_clear(struct text *text) {
    memory_resize(text->bytes, text->size, 0);
    *text = (struct text){0};
}

static void close_script(struct session *session) {
    if (session->script_fd >= 0)
        close(session->script_fd);
    session->script_fd = -1;
}

/* Frees a session that has neither shell nor calls. */
static void discard(struct session *session) {
    struct session **at = &sessions;
    while (*at != session)
        at = &(*at)->next;
    *at = session->next;
    text_clear(&session->unread);
    free(session->name);
    loop_free_later(session);
}

static bool text_add_bytes(struct text *text, const char *bytes, size_t count) {
    size_t needed = text->length + count;
    if (count == 0)
        return true;
    if (needed > text->size) {
        size_t size = text->size * 2 > needed ? text->size * 2 : needed + 512;
        char *made = memory_resize(text->bytes, text->size, size);
        if (made == NULL)
            return false;
        text->bytes = made;
        text->size = size;
    }
    memcpy(text->bytes + text->length, bytes, count);
    text->length += count;
    return true;
}

static bool text_add(struct text *text, const char *string) { return text_add_bytes(text, string, strlen(string)); }

/* Within single quotes: each ' becomes '\''. */
static bool text_add_quoted(struct text *text, const char *string) {
    for (;;) {
        size_t plain = strcspn(string, "'");
        if (!text_add_bytes(text, string, plain))
            return false;
        if (string[plain] == '\0')
            return true;
        if (!text_add(text, "'\\''"))
            return false;
        string += plain + 1;
    }
}

static void new_nonce(struct session *session) {
    uint8_t bytes[NONCE_CHARACTERS / 2] = {0};
    (void)!getrandom(bytes, sizeof bytes, 0);
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(session->nonce + 2 * i, 3, "%02x", bytes[i]);
}

static bool is_name(const char *pair) {
    size_t length = strspn(pair, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789");
    return length > 0 && pair[length] == '=' && (pair[0] < '0' || pair[0] > '9');
}

/* `export NAME='value'` for the environment that came with the call. */
static bool text_add_exports(struct text *text, const struct strings *env) {
    for (uint32_t i = 0; i < env->count; i++) {
        const char *pair = env->items[i];
        size_t length = strcspn(pair, "=");
        if (!is_name(pair))
            continue;
        if (!text_add(text, "\\command export ") || !text_add_bytes(text, pair, length + 1) || !text_add(text, "'") ||
            !text_add_quoted(text, pair + length + 1) || !text_add(text, "';"))
            return false;
    }
    return true;
}

/* Gone before the script begins: with `set -a` the programs that it starts would get it in their environment. */
#define FORGET_SCRIPT "\\command unset -v __rollway_script;"

/* What eval gets. The line end keeps a comment, or a `\`, at the script's end from what follows. Ends with NUL. */
static bool make_script(const struct session *session, const struct run_request *request, struct text *script) {
    return text_add(script, session->script_fd >= 0 ? FORGET_SCRIPT : "") && text_add_exports(script, &request->env) &&
           text_add(script, session->verbose ? "set -v;" : "") && text_add(script, session->traced ? "set -x;" : "") &&
           text_add(script, request->argv.items[1]) && text_add_bytes(script, "\n", 2);
}

static bool store_script(int fd, const struct text *script) {
    return ftruncate(fd, 0) == 0 && pwrite(fd, script->bytes, script->length, 0) == (ssize_t)script->length && lseek(fd, 0, SEEK_SET) == 0;
}

static const char *reach_target(const struct session *session) {
    return session->reach == REACH_PATH ? "/proc/self/fd/250" : "&250";
}

/* The script runs through eval, within one command that the shell has read to its end before it starts: nothing that the script reads,
 * nor an error of its syntax, touches what comes next; the empty line before is for bash, which after a quote that was never closed would
 * take what follows as arguments. `\command` keeps aliases and functions of the script out, and dash alive. Its status and the shell's
 * flags come over the control pipe behind a number that no earlier script knew. */
static bool write_line(struct session *session, const struct text *script) {
    struct text *line = &session->unread;
    char end[256];
    new_nonce(session);
    snprintf(end, sizeof end, " </dev/null; { \\command printf '%%s %%d %%s.\\n' %s \"$?\" \"$-\" >%s; \\command set +xv; } 2>/dev/null; }\n",
             session->nonce, reach_target(session));
    if (session->script_fd >= 0 && store_script(session->script_fd, script))
        return text_add(line, "\n{ IFS= \\command read -r -d '' __rollway_script <&251 && \\command eval \"$__rollway_script\"") && text_add(line, end);
    return text_add(line, "\n{ \\command eval '") && text_add_quoted(line, script->bytes) && text_add(line, "'") && text_add(line, end);
}

static bool write_script(struct session *session, const struct run_request *request) {
    struct text script = {0};
    bool written = make_script(session, request, &script) && write_line(session, &script);
    text_clear(&script);
    return written;
}

/* Asks the shell which way it reaches the control pipe. */
static bool write_question(struct session *session) {
    char text[384];
    new_nonce(session);
    snprintf(text, sizeof text,
             "(\\command eval '\\command printf \"%%s 0 d.\\n\" %s >&250') 2>/dev/null || \\command printf '%%s 0 p.\\n' %s >/proc/self/fd/250\n",
             session->nonce, session->nonce);
    return text_add(&session->unread, text);
}

void session_feed(struct session *session) {
    struct source *in = &session->job->in;
    struct text *unread = &session->unread;
    while (in->fd >= 0 && unread->start < unread->length) {
        ssize_t count = write(in->fd, unread->bytes + unread->start, unread->length - unread->start);
        if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
            source_want(in, EPOLLOUT);
            return;
        }
        if (count < 0) { /* the shell is gone, or closed its stdin: its end is reported apart */
            source_close(in);
            break;
        }
        unread->start += (size_t)count;
    }
    source_want(in, 0);
    text_clear(unread);
}

static void next_script(struct session *session) {
    if (session->reach == REACH_UNKNOWN ? write_question(session) : write_script(session, &session->running->request))
        session_feed(session);
    else
        job_kill(session->job);
}

static void run_next(struct session *session);

/* One line of the control pipe: "NONCE STATUS FLAGS." */
static void line_said(struct session *session) {
    int status;
    char flags[64] = "";
    size_t length = strlen(session->nonce);
    session->line[session->line_length] = '\0';
    if (length == 0 || session->running == NULL || strncmp(session->line, session->nonce, length) != 0 ||
        sscanf(session->line + length, " %d %63s", &status, flags) < 1 || session->job->killing)
        return;
    session->nonce[0] = '\0';
    if (session->reach == REACH_UNKNOWN) {
        session->reach = strchr(flags, 'p') != NULL ? REACH_PATH : REACH_DESCRIPTOR;
        next_script(session);
        return;
    }
    session->traced = strchr(flags, 'x') != NULL;
    session->verbose = strchr(flags, 'v') != NULL;
    struct call *call = session->running;
    job_drain(session->job);
    if (session->job->killing) /* it printed too much just now */
        return;
    session->running = NULL;
    session->job->call = NULL;
    call_finish(call, &(struct report){.how = HOW_EXITED, .code = status});
    run_next(session);
}

static void control_ready(struct source *source, uint32_t events) {
    struct job *job = owner_of(source, struct job, control);
    struct session *session = job->session;
    uint8_t bytes[LINE_BYTES];
    (void)events;
    ssize_t count = job_read(source, bytes, sizeof bytes);
    if (count < 0)
        return;
    if (count == 0) {
        source_close(source); /* the shell ended, or lost the pipe: its calls end by their time then */
        return;
    }
    for (ssize_t i = 0; i < count && job->session == session; i++) {
        if (bytes[i] == '\n') {
            line_said(session);
            session->line_length = 0;
        } else if (session->line_length < LINE_BYTES - 1) {
            session->line[session->line_length++] = (char)bytes[i];
        }
    }
}

static bool is_bash(const char *shell) {
    const char *slash = strrchr(shell, '/');
    return strcmp(slash != NULL ? slash + 1 : shell, "bash") == 0;
}

/* Starts the shell for the running call. */
static bool start_shell(struct session *session) {
    struct run_request request = session->running->request;
    char *shell = request.argv.items[0];
    char *bash[] = {shell, "--noprofile", "--norc", NULL}, *other[] = {shell, NULL};
    bool known = is_bash(shell);
    request.argv = (struct strings){.items = known ? bash : other, .count = known ? 3 : 1};
    session->script_fd = known ? memfd_create("script", MFD_CLOEXEC) : -1;
    session->job = call_start_job(&request, control_ready, session->script_fd);
    if (session->job == NULL) {
        close_script(session);
        return false;
    }
    session->job->session = session;
    session->reach = known ? REACH_DESCRIPTOR : REACH_UNKNOWN;
    session->traced = session->verbose = false;
    session->line_length = 0;
    text_clear(&session->unread);
    return true;
}

/* Takes up the next call that waits, or leaves the shell idle. A session without a shell and calls is none. */
static void run_next(struct session *session) {
    while (session->running == NULL && session->waiting != NULL) {
        struct call *call = session->waiting;
        session->waiting = call->session_next;
        call->waiting = false;
        session->running = call;
        if (session->job == NULL && !start_shell(session)) {
            session->running = NULL;
            call_fail(call, ERROR_NO_PROCESS, strerror(errno));
            continue;
        }
        job_drain(session->job); /* what came between the calls belongs to none */
        call->job = session->job;
        session->job->call = call;
        next_script(session);
    }
    if (session->running == NULL && session->job == NULL)
        discard(session);
}

int session_run(struct call *call) {
    struct session *session = find(call->request.session);
    if (session == NULL) {
        session = calloc(1, sizeof *session);
        if (session == NULL || (session->name = strdup(call->request.session)) == NULL) {
            free(session);
            return ERROR_FULL;
        }
        session->script_fd = -1;
        session->next = sessions;
        sessions = session;
    }
    struct call **at = &session->waiting;
    while (*at != NULL)
        at = &(*at)->session_next;
    *at = call;
    call->session_next = NULL;
    call->session = session;
    call->waiting = true;
    run_next(session);
    return 0;
}

void session_drop(struct call *call) {
    struct call **at = &call->session->waiting;
    while (*at != NULL && *at != call)
        at = &(*at)->session_next;
    if (*at == call)
        *at = call->session_next;
    call->waiting = false;
}

/* Parts from the shell; what it left behind goes on as any call's leftovers do. */
static struct call *part(struct session *session) {
    struct call *call = session->running;
    struct job *job = session->job;
    session->running = NULL;
    session->job = NULL;
    session->nonce[0] = '\0';
    text_clear(&session->unread);
    close_script(session);
    if (call != NULL)
        job->call_id = call->id;
    job_leave(job);
    return call;
}

void session_shell_ended(struct session *session) {
    struct report report = session->job->report;
    struct call *call = part(session);
    if (call != NULL) {
        call->job = NULL;
        call->flags |= report.how == HOW_NOT_STARTED ? 0 : ENDED_SESSION;
        if (report.how == HOW_NOT_STARTED && !report.no_workdir && report.failed == 0)
            call_fail(call, ERROR_NO_SHELL, strerror(report.code));
        else
            call_finish(call, &report);
    }
    run_next(session);
}

void session_dead(struct session *session) { session_shell_ended(session); }
