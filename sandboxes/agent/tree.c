#define _GNU_SOURCE
#include "tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { PROCESSES_MAX = 32768, ROUNDS_MAX = 40 };

struct process {
    pid_t pid, parent;
    bool dead;      /* a zombie, or on its way to be one */
    bool inside;    /* descends from the root */
    bool settled;   /* whether `inside` is known to be right */
};

/* Sorted by pid, since /proc lists them so; `stopped` holds those of earlier rounds. */
static struct process processes[PROCESSES_MAX];
static size_t process_count;
static pid_t stopped[PROCESSES_MAX];
static size_t stopped_count;

/* Reads the state and the parent out of /proc/PID/stat. The name of a process stands in it in brackets and may hold anything, brackets
 * too: what counts begins behind the last one. */
static bool read_process(int proc, const char *pid, struct process *process) {
    char path[32], text[512];
    snprintf(path, sizeof path, "%.12s/stat", pid);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return false;
    text[length] = '\0';
    char state, *behind = strrchr(text, ')');
    int parent;
    if (behind == NULL || sscanf(behind, ") %c %d", &state, &parent) != 2)
        return false;
    *process = (struct process){.pid = atoi(pid), .parent = parent, .dead = state == 'Z' || state == 'X'};
    return true;
}

static bool read_processes(void) {
    process_count = 0;
    DIR *proc = opendir("/proc");
    if (proc == NULL)
        return false;
    for (struct dirent *entry; process_count < PROCESSES_MAX && (entry = readdir(proc)) != NULL;)
        if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && read_process(dirfd(proc), entry->d_name, &processes[process_count]))
            process_count++;
    closedir(proc);
    return process_count < PROCESSES_MAX;
}

static int by_pid(const void *a, const void *b) {
    pid_t one = *(const pid_t *)a, other = *(const pid_t *)b; /* the first member of a process is its pid */
    return (one > other) - (one < other);
}

static struct process *find_process(pid_t pid) { return bsearch(&pid, processes, process_count, sizeof *processes, by_pid); }

/* Follows the parents up to the root, or out. A parent that is not there ended while /proc was read, so that nothing is known: false. */
static bool settle(pid_t root, bool (*spared)(pid_t), struct process *process) {
    struct process *at = process;
    bool inside = false, known = true;
    for (size_t steps = 0; steps < process_count; steps++) {
        if (at->settled) {
            inside = at->inside;
            break;
        }
        if (at->parent == 0 || at->pid == root || spared(at->pid))
            break;
        if (at->parent == root) {
            inside = true;
            break;
        }
        at = find_process(at->parent);
        if (at == NULL) {
            known = false;
            break;
        }
    }
    process->inside = inside;
    process->settled = known;
    return known;
}

static bool stop_once(pid_t pid) {
    if (bsearch(&pid, stopped, stopped_count, sizeof *stopped, by_pid) != NULL)
        return false;
    kill(pid, SIGSTOP);
    return true;
}

/* Stops what is new since the last round; whether there was anything, or may have been. */
static bool stop_round(pid_t root, bool (*spared)(pid_t), size_t *alive) {
    bool more = !read_processes();
    qsort(processes, process_count, sizeof *processes, by_pid);
    *alive = 0;
    for (size_t i = 0; i < process_count; i++) {
        struct process *process = &processes[i];
        if (!settle(root, spared, process))
            more = true;
        if (!process->inside || process->dead)
            continue;
        ++*alive;
        more |= stop_once(process->pid);
    }
    stopped_count = 0;
    for (size_t i = 0; i < process_count; i++)
        if (processes[i].inside && !processes[i].dead)
            stopped[stopped_count++] = processes[i].pid;
    return more;
}

static bool spare_none(pid_t pid) {
    (void)pid;
    return false;
}

size_t tree_count(pid_t root, bool (*left_out)(pid_t pid)) {
    size_t alive = 0;
    read_processes();
    qsort(processes, process_count, sizeof *processes, by_pid);
    for (size_t i = 0; i < process_count; i++) {
        struct process *process = &processes[i];
        bool known = settle(root, spare_none, process);
        if ((process->inside || !known) && !process->dead && !left_out(process->pid))
            alive++;
    }
    return alive;
}

size_t tree_kill(pid_t root, bool (*spared)(pid_t pid)) {
    size_t alive = 0;
    int rounds = 0;
    stopped_count = 0;
    while (stop_round(root, spared, &alive) && rounds < ROUNDS_MAX)
        rounds++;
    if (rounds == ROUNDS_MAX && getpid() == 1)
        kill(-1, SIGKILL);
    for (size_t i = 0; i < stopped_count; i++)
        kill(stopped[i], SIGKILL);
    return alive;
}
