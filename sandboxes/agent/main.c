/* The first process of a sandbox (PROTOCOL.md). One thread waits for everything in one place and never waits elsewhere; what may take
 * long runs in children. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "call.h"
#include "environment.h"
#include "frame.h"
#include "harden.h"
#include "job.h"
#include "link.h"
#include "loop.h"
#include "oom.h"
#include "server.h"
#include "spawn.h"

enum { EXIT_USAGE = 64, LAST_SIGNAL = 64, STOP_US = 2000000 };

extern char **environ;

struct options {
    bool own_network, root_capabilities, pause, version;
    int listen_fd, oom_fd;
};

static bool ending;

static int fd_argument(char **arguments) {
    char *end;
    long fd = arguments[1] != NULL ? strtol(arguments[1], &end, 10) : -1;
    if (fd < 0 || fd > 65535 || *end != '\0') {
        fprintf(stderr, "rollway agent: %s takes the number of an inherited descriptor\n", arguments[0]);
        exit(EXIT_USAGE);
    }
    return (int)fd;
}

static struct options parse_options(char **arguments) {
    struct options options = {.listen_fd = -1, .oom_fd = -1};
    for (; *arguments != NULL; arguments++) {
        if (strcmp(*arguments, "--own-network") == 0)
            options.own_network = true;
        else if (strcmp(*arguments, "--root-capabilities") == 0)
            options.root_capabilities = true;
        else if (strcmp(*arguments, "--pause") == 0)
            options.pause = true;
        else if (strcmp(*arguments, "--version") == 0)
            options.version = true;
        else if (strcmp(*arguments, "--listen") == 0)
            options.listen_fd = fd_argument(arguments++);
        else if (strcmp(*arguments, "--oom") == 0)
            options.oom_fd = fd_argument(arguments++);
        else {
            fprintf(stderr, "rollway agent: no such option: %s\n"
                            "usage: agent [--own-network] [--root-capabilities] [--listen FD] [--oom FD] | --pause | --version\n", *arguments);
            exit(EXIT_USAGE);
        }
    }
    return options;
}

/* New pipes must never get the numbers of stdin, stdout and stderr. */
static void open_missing(void) {
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            (void)!open("/dev/null", O_RDWR);
}

/* What the agent was started with ignored, what it starts would ignore too. */
static void reset_signals(void) {
    for (int number = 1; number <= LAST_SIGNAL; number++)
        signal(number, SIG_DFL);
}

/* Holds a network namespace until it is killed. */
static _Noreturn void hold_namespaces(void) {
    signal(SIGTERM, _exit);
    signal(SIGINT, _exit);
    signal(SIGCHLD, SIG_IGN);
    for (;;)
        pause();
}

/* As the first process it is asked to end by the engine alone: what comes from inside its own namespace has a sender it can see. */
static bool asks_to_end(const struct signalfd_siginfo *about) {
    return (about->ssi_signo == SIGTERM || about->ssi_signo == SIGINT) && (getpid() != 1 || about->ssi_pid == 0);
}

static void signalled(struct source *source, uint32_t events) {
    struct signalfd_siginfo about;
    (void)events;
    while (read(source->fd, &about, sizeof about) == sizeof about)
        ending |= asks_to_end(&about);
    jobs_reap();
}

/* Every signal is blocked: none ends the agent, and those it knows are read. */
static void open_signals(struct source *source) {
    sigset_t all, read_here;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigemptyset(&read_here);
    sigaddset(&read_here, SIGCHLD);
    sigaddset(&read_here, SIGTERM);
    sigaddset(&read_here, SIGINT);
    int fd = signalfd(-1, &read_here, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0 || source_open(source, fd, EPOLLIN, signalled) != 0) {
        perror("rollway agent: signalfd");
        exit(70);
    }
}

static void stdin_ended(void) { ending = true; }

static void turn(void) {
    int64_t now = now_us();
    calls_tick(now);
    jobs_tick(now);
    do
        server_turn();
    while (links_flush());
    loop_turn(earlier(calls_deadline(), jobs_deadline()));
}

/* The kernel takes all others along when process 1 ends; elsewhere that is for us to do. */
static void end_all(void) {
    int64_t until = now_us() + STOP_US;
    jobs_kill_all();
    while (jobs_alive() && now_us() < until) {
        jobs_tick(now_us());
        loop_turn(now_us() + 10000);
    }
}

int main(int argc, char **argv) {
    (void)argc;
    struct options options = parse_options(argv + 1);
    struct source signals;
    if (options.version) {
        printf("%d\n", VERSION);
        return 0;
    }
    reset_signals();
    if (options.pause)
        hold_namespaces();
    open_missing();
    umask(022);
    if (options.own_network)
        harden_network();
    uint32_t features = harden_self(options.own_network, options.root_capabilities) | FEATURE_DISK_WATCH;
    features |= options.own_network ? FEATURE_OWN_NETWORK : 0;
    features |= getpid() == 1 ? FEATURE_FIRST_PROCESS : 0;
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    frame_prepare();
    spawn_prepare();
    loop_open();
    open_signals(&signals);
    oom_open(options.oom_fd);
    environment_open(environ);
    server_open(features);
    if (options.listen_fd >= 0)
        link_listen(options.listen_fd, server_handle);
    else
        link_stdio(server_handle, stdin_ended);
    while (!ending)
        turn();
    end_all();
    return 0;
}
