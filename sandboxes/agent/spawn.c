#define _GNU_SOURCE
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "files.h"
#include "frame.h"
#include "harden.h"
#include "spare.h"
#include "user.h"

enum { STATUS_FD = 3, FILES_MAX = 16384 };

static const char DEFAULT_PATH[] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

static struct rlimit files_before;
static bool files_raised;

void spawn_prepare(void) {
    if (getrlimit(RLIMIT_NOFILE, &files_before) != 0 || files_before.rlim_cur >= FILES_MAX)
        return;
    struct rlimit more = files_before;
    more.rlim_cur = more.rlim_max < FILES_MAX ? more.rlim_max : FILES_MAX;
    files_raised = setrlimit(RLIMIT_NOFILE, &more) == 0;
}

static void report(struct report said) { (void)!send(STATUS_FD, &said, sizeof said, MSG_NOSIGNAL); }

static _Noreturn void report_failure(struct report said) {
    report(said);
    _exit(127);
}

/* The kernel is to take the sandbox's processes before the agent when memory runs out. Needs no privilege: it only goes up. Commands
 * inherit it from their supervisor, which is the smallest of them. */
static void offer_to_oom_killer(void) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    (void)!write(fd, "1000", 4);
    close(fd);
}

static const char *find_env(char **env, const char *name) {
    size_t length = strlen(name);
    for (; *env != NULL; env++)
        if (strncmp(*env, name, length) == 0 && (*env)[length] == '=')
            return *env + length + 1;
    return NULL;
}

/* Executes argv[0], looked for in PATH as execvp does it. Returns errno. */
static int execute(char **argv, char **env) {
    char path[4096];
    const char *name = argv[0], *list = find_env(env, "PATH");
    int reason = ENOENT;
    if (*name == '\0')
        return ENOENT;
    if (strchr(name, '/') != NULL) {
        execve(name, argv, env);
        return errno;
    }
    for (list = list != NULL ? list : DEFAULT_PATH; list != NULL;) {
        const char *end = strchrnul(list, ':');
        int length = (int)(end - list);
        if (snprintf(path, sizeof path, "%.*s%s%s", length, list, length > 0 ? "/" : "", name) < (int)sizeof path) {
            execve(path, argv, env);
            if (errno == EACCES)
                reason = EACCES;
            else if (errno != ENOENT && errno != ENOTDIR)
                return errno;
        }
        list = *end != '\0' ? end + 1 : NULL;
    }
    return reason;
}

/* Between vfork and exec: its memory is the supervisor's, so it only makes system calls and writes to its own frames. */
static _Noreturn void become_command(const struct spawn *spawn, const struct user *user) {
    sigset_t none;
    setsid();
    if (user_become(user) != 0)
        report_failure((struct report){.how = HOW_NOT_STARTED, .failed = ERROR_NO_USER, .code = errno});
    if (harden_child() != 0)
        report_failure((struct report){.how = HOW_NOT_STARTED, .code = errno});
    if (chdir(spawn->workdir) != 0)
        report_failure((struct report){.how = HOW_NOT_STARTED, .no_workdir = 1, .code = errno});
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    report_failure((struct report){.how = HOW_NOT_STARTED, .code = execute(spawn->argv, spawn->env)});
}

static pid_t start_command(const struct spawn *spawn, const struct user *user) {
    pid_t pid = vfork();
    if (pid == 0)
        become_command(spawn, user);
    return pid;
}

static void close_range_or_each(unsigned first, unsigned last) {
    if (syscall(SYS_close_range, first, last, 0) == 0)
        return;
    for (unsigned fd = first; fd <= last && fd < FILES_MAX; fd++)
        close((int)fd);
}

/* Puts the pipes to 0, 1 and 2, the socket to STATUS_FD, what a lasting shell needs to CONTROL_FD and SCRIPT_FD, and closes all else: a supervisor must not hold
 * the other calls' pipes open. */
static int place_descriptors(const struct spawn *spawn, int status) {
    int control = spawn->control >= 0 ? fcntl(spawn->control, F_DUPFD, SCRIPT_FD + 1) : -1;
    int script = spawn->script >= 0 ? fcntl(spawn->script, F_DUPFD, SCRIPT_FD + 1) : -1;
    if ((spawn->control >= 0 && control < 0) || (spawn->script >= 0 && script < 0))
        return -1;
    dup2(spawn->in, 0);
    dup2(spawn->out, 1);
    dup2(spawn->err, 2);
    if (status != STATUS_FD && dup3(status, STATUS_FD, O_CLOEXEC) < 0)
        return -1;
    unsigned rest = STATUS_FD + 1;
    if (control >= 0) {
        dup2(control, CONTROL_FD);
        close_range_or_each(rest, CONTROL_FD - 1);
        rest = CONTROL_FD + 1;
    }
    if (script >= 0) {
        dup2(script, SCRIPT_FD);
        rest = SCRIPT_FD + 1;
    }
    close_range_or_each(rest, ~0u);
    return 0;
}

/* Lets the user open /dev/stdout and the like: it is the pipe's owner who may. */
static void give_pipes(const struct spawn *spawn, const struct user *user) {
    if (user_is_ours(user))
        return;
    for (int fd = 0; fd <= 2; fd++)
        (void)!fchown(fd, user->uid, user->gid);
    if (spawn->control >= 0)
        (void)!fchown(CONTROL_FD, user->uid, user->gid);
}

/* Sets HOME to the user's own where nobody asked for another. The array has a free place at its end. */
static void set_home(char **env, const struct user *user) {
    static char home[USER_HOME_MAX + 8];
    if (user->home[0] == '\0')
        return;
    snprintf(home, sizeof home, "HOME=%s", user->home);
    while (*env != NULL && strncmp(*env, "HOME=", 5) != 0)
        env++;
    if (*env == NULL)
        env[1] = NULL;
    *env = home;
}

/* What those that were reaped here wrote to storage since this was asked last. */
static uint64_t newly_written(void) {
    static uint64_t known;
    struct rusage usage;
    if (getrusage(RUSAGE_CHILDREN, &usage) != 0)
        return 0;
    uint64_t all = (uint64_t)usage.ru_oublock * 512, since = all - known;
    known = all;
    return since;
}

/* Waits for all that descends from here; reports how the command itself ended, and when nothing is left. */
static void wait_for_all(pid_t command) {
    struct report last = {.idle = 1};
    int status, block = 0;
    for (pid_t pid; (pid = wait4(-1, &status, block, NULL)) >= 0 || errno == EINTR;) {
        if (pid == 0) { /* the command left something behind */
            last.written = newly_written();
            report(last);
            block = 0;
            last = (struct report){.idle = 1};
        } else if (pid == command) {
            last.how = WIFEXITED(status) ? HOW_EXITED : HOW_SIGNALLED;
            last.code = WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status);
            last.idle = 0;
            block = WNOHANG; /* mostly nothing is: one message then says both */
        }
    }
    last.idle = 1;
    last.written = newly_written();
    report(last);
}

static _Noreturn void move_files(const struct spawn *spawn, const struct user *user) {
    if (spawn->kind == KIND_READ && (user_become(user) != 0 || harden_child() != 0))
        report_failure((struct report){.how = HOW_NOT_STARTED, .failed = ERROR_NO_USER, .code = errno});
    struct files_owner owner = {.uid = user->uid, .gid = user->gid};
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int code = files_main(spawn->kind, spawn->argc, spawn->argv, &owner);
    report((struct report){.how = HOW_EXITED, .code = code});
    _exit(0);
}

/* With its pipes at 0, 1 and 2. Returns when all that the command started is dead. */
static void supervise_one(const struct spawn *spawn) {
    static struct user user;
    if (!user_find(&user, spawn->user))
        report_failure((struct report){.how = HOW_NOT_STARTED, .failed = ERROR_NO_USER, .code = ENOENT});
    if (spawn->kind >= KIND_PACK)
        move_files(spawn, &user);
    give_pipes(spawn, &user);
    if (!spawn->home_given && *spawn->user != '\0')
        set_home(spawn->env, &user);
    pid_t command = start_command(spawn, &user);
    if (command < 0)
        report_failure((struct report){.how = HOW_NOT_STARTED, .failed = ERROR_NO_PROCESS, .code = errno});
    close_range_or_each(0, 2);
    if (spawn->control >= 0 || spawn->script >= 0)
        close_range_or_each(CONTROL_FD, SCRIPT_FD);
    wait_for_all(command);
}

/* What holds for all that it ever starts. */
static void prepare_supervisor(void) {
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    offer_to_oom_killer();
    if (files_raised)
        setrlimit(RLIMIT_NOFILE, &files_before);
}

static _Noreturn void supervise(const struct spawn *spawn, int status) {
    static struct spawn next;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL); /* what the sandbox sends to its every process does not end supervisors */
    if (place_descriptors(spawn, status) != 0)
        _exit(1);
    if (spawn->kind < KIND_PACK)
        prepare_supervisor();
    supervise_one(spawn);
    while (spare_receive(STATUS_FD, &next))
        supervise_one(&next);
    _exit(0);
}

pid_t spawn_start(const struct spawn *spawn, int *status) {
    int pair[2];
    pid_t pid = spare_send(spawn, status);
    if (pid > 0)
        return pid;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        return -1;
    pid = fork();
    if (pid == 0)
        supervise(spawn, pair[1]);
    int reason = errno;
    close(pair[1]);
    if (pid < 0)
        close(pair[0]);
    *status = pair[0];
    errno = reason;
    return pid;
}
