#define _GNU_SOURCE
#include "session.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "memory.h"

enum { LINE_BYTES = 256, NONCE_CHARACTERS = 32 };

/* How this shell reaches the control pipe: dash knows no descriptor of two digits, but opens any path. */
enum reach { REACH_UNKNOWN, REACH_DESCRIPTOR, REACH_PATH };

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
    char *text; /* what the shell has not read yet */
    size_t text_size, text_start, text_length;
};

static struct session *sessions;

static struct session *find(const char *name) {
    for (struct session *session = sessions; session != NULL; session = session->next)
        if (strcmp(session->name, name) == 0)
            return session;
    return NULL;
}

static void text_clear(struct session *session) {
    memory_resize(session->text, session->text_size, 0);
    session->text = NULL;
    session->text_size = session->text_start = session->text_length = 0;
}

/* Frees a session that has neither shell nor calls. */
static void discard(struct session *session) {
    struct session **at = &sessions;
    while (*at != session)
        at = &(*at)->next;
    *at = session->next;
    text_clear(session);
    free(session->name);
    loop_free_later(session);
}

static bool text_add(struct session *session, const char *bytes, size_t count) {
    size_t needed = session->text_length + count;
    if (needed > session->text_size) {
        size_t size = session->text_size * 2 > needed ? session->text_size * 2 : needed + 512;
        char *made = memory_resize(session->text, session->text_size, size);
        if (made == NULL)
            return false;
        session->text = made;
        session->text_size = size;
    }
    memcpy(session->text + session->text_length, bytes, count);
    session->text_length += count;
    return true;
}

static bool text_add_string(struct session *session, const char *string) { return text_add(session, string, strlen(string)); }

/* Within single quotes: each ' becomes '\''. */
static bool text_add_quoted(struct session *session, const char *string) {
    for (;;) {
        size_t plain = strcspn(string, "'");
        if (!text_add(session, string, plain))
            return false;
        if (string[plain] == '\0')
            return true;
        if (!text_add_string(session, "'\\''"))
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

/* `export NAME='value'` for the environment that came with the call, all inside the quotes of eval. */
static bool text_add_exports(struct session *session, const struct strings *env) {
    for (uint32_t i = 0; i < env->count; i++) {
        const char *pair = env->items[i];
        size_t length = strcspn(pair, "=");
        if (!is_name(pair))
            continue;
        if (!text_add_string(session, "\\command export ") || !text_add(session, pair, length) || !text_add_string(session, "='\\''"))
            return false;
        for (const char *value = pair + length + 1; *value != '\0'; value++) {
            bool added = *value == '\'' ? text_add_string(session, "'\\''\\'\\'''\\''") : text_add(session, value, 1);
            if (!added)
                return false;
        }
        if (!text_add_string(session, "'\\'';"))
            return false;
    }
    return true;
}

static const char *reach_target(const struct session *session) {
    return session->reach == REACH_PATH ? "/proc/self/fd/250" : "&250";
}

/* The script runs through eval, within one command that the shell has read to its end before it starts: nothing that the script reads,
 * nor an error of its syntax, touches what comes next. `\command` keeps aliases and functions of the script out, and dash alive. Its status
 * and the shell's flags come over the control pipe behind a number that no earlier script knew. */
static bool write_script(struct session *session, const struct run_request *request) {
    char end[256];
    new_nonce(session);
    snprintf(end, sizeof end, "\n' </dev/null; { \\command printf '%%s %%d %%s.\\n' %s \"$?\" \"$-\" >%s; \\command set +xv; } 2>/dev/null; }\n",
             session->nonce, reach_target(session));
    return text_add_string(session, "{ \\command eval '") && text_add_exports(session, &request->env) &&
           text_add_string(session, session->verbose ? "set -v;" : "") && text_add_string(session, session->traced ? "set -x;" : "") &&
           text_add_quoted(session, request->argv.items[1]) && text_add_string(session, end);
}

/* Asks the shell which way it reaches the control pipe. */
static bool write_question(struct session *session) {
    char text[384];
    new_nonce(session);
    snprintf(text, sizeof text,
             "(\\command eval '\\command printf \"%%s 0 d.\\n\" %s >&250') 2>/dev/null || \\command printf '%%s 0 p.\\n' %s >/proc/self/fd/250\n",
             session->nonce, session->nonce);
    return text_add_string(session, text);
}

void session_feed(struct session *session) {
    struct source *in = &session->job->in;
    while (in->fd >= 0 && session->text_start < session->text_length) {
        ssize_t count = write(in->fd, session->text + session->text_start, session->text_length - session->text_start);
        if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
            source_want(in, EPOLLOUT);
            return;
        }
        if (count < 0) { /* the shell is gone, or closed its stdin: its end is reported apart */
            source_close(in);
            break;
        }
        session->text_start += (size_t)count;
    }
    source_want(in, 0);
    text_clear(session);
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
    session->job = call_start_job(&request, control_ready);
    if (session->job == NULL)
        return false;
    session->job->session = session;
    session->reach = known ? REACH_DESCRIPTOR : REACH_UNKNOWN;
    session->traced = session->verbose = false;
    session->line_length = 0;
    text_clear(session);
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
    text_clear(session);
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
