#define _GNU_SOURCE
#include "watch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/fsuid.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "walk.h"

enum {
    LOOK_MS = 200,       /* between looks at the free space while active */
    PERIOD_MS = 1000,    /* between walks, at least, while much is written */
    LONGEST_MS = 120000, /* and at most, though nothing seems to be written */
    SHARE = 30,          /* a walk takes at most a thirtieth of the time */
    HURRIED_SHARE = 10,  /* or a tenth, when the disk fills */
    STACK = 65536,
    UNLINKED = 1024,     /* unlinked files told apart; past it one held open twice counts twice */
    WHOLE = 1 << 20,     /* one inode, in the parts that its links share */
};

struct used {
    uint64_t bytes, inode_parts;
    int too_deep;
};

static atomic_uint_fast64_t limit_bytes, limit_inodes, used_bytes, used_inodes;
static atomic_uint_fast64_t *told_bytes; /* shared with the forks; NULL before there is a watch */
static atomic_int active, parked;
static int trip_fd = -1, wake_fd = -1;

/* The thread's own from here on. */
static struct walk walk;
static struct timespec began; /* by the clock that ctime is taken from */
static dev_t root_device;
static struct {
    dev_t device;
    ino_t inode;
} unlinked[UNLINKED];
static unsigned unlinked_count;

static int is_own(const struct stat *status) {
    if (status->st_dev != root_device) return 0;
    return status->st_ctim.tv_sec > began.tv_sec || (status->st_ctim.tv_sec == began.tv_sec && status->st_ctim.tv_nsec >= began.tv_nsec);
}

/* Each of a file's links brings its part: none is kept in memory, and together they are the file once. */
static void count(struct used *used, const struct stat *status) {
    uint64_t links = S_ISDIR(status->st_mode) || status->st_nlink == 0 ? 1 : status->st_nlink;
    used->bytes += (uint64_t)status->st_blocks * 512 / links;
    used->inode_parts += WHOLE / links;
}

static void count_tree(struct used *used) {
    struct stat status;
    int root = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) return;
    walk_begin(&walk, root, WATCH_DEPTH);
    while (walk.depth > 0) {
        const char *name = walk_next(&walk);
        if (name == NULL) {
            walk_up(&walk);
            continue;
        }
        if (fstatat(walk_fd(&walk), name, &status, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT) != 0) continue;
        if (is_own(&status)) count(used, &status);
        if (!S_ISDIR(status.st_mode) || status.st_dev != root_device) continue;
        if (walk_down(&walk, name) != 0 && errno == ELOOP && walk.depth == WATCH_DEPTH) used->too_deep = 1;
    }
}

static int is_known(const struct stat *status) {
    for (unsigned i = 0; i < unlinked_count; i++)
        if (unlinked[i].inode == status->st_ino && unlinked[i].device == status->st_dev) return 1;
    if (unlinked_count == UNLINKED) return 0;
    unlinked[unlinked_count].inode = status->st_ino;
    unlinked[unlinked_count++].device = status->st_dev;
    return 0;
}

/* Files without a name that the process `pid` holds open. /proc shows them to who has the process's own ids. */
static void count_held(struct used *used, const char *pid) {
    struct stat status;
    char open_files[32];
    if (strlen(pid) > 16 || fstatat(walk_fd(&walk), pid, &status, 0) != 0) return;
    snprintf(open_files, sizeof open_files, "%s/fd", pid);
    setfsgid(status.st_gid);
    setfsuid(status.st_uid);
    if (walk_down(&walk, open_files) == 0) {
        const char *name;
        while ((name = walk_next(&walk)) != NULL) {
            if (fstatat(walk_fd(&walk), name, &status, 0) != 0 || !S_ISREG(status.st_mode) || status.st_nlink > 0) continue;
            if (is_own(&status) && !is_known(&status)) count(used, &status);
        }
        walk_up(&walk);
    }
    setfsuid(geteuid());
    setfsgid(getegid());
}

static void count_unlinked(struct used *used) {
    int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (proc < 0) return;
    unlinked_count = 0;
    walk_begin(&walk, proc, 2);
    const char *name;
    while ((name = walk_next(&walk)) != NULL)
        if (name[0] >= '1' && name[0] <= '9' && atoi(name) != getpid()) count_held(used, name);
    walk_end(&walk);
}

static uint64_t now_ms(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / 1000000;
}

static uint64_t free_bytes(void) {
    struct statvfs status;
    return statvfs("/", &status) == 0 ? (uint64_t)status.f_bfree * status.f_frsize : 0;
}

static uint64_t number_behind(const char *text, const char *name) {
    const char *found = strstr(text, name);
    return found != NULL ? strtoull(found + strlen(name), NULL, 10) : 0;
}

/* What the process `pid` and all it has reaped wrote to storage; /proc shows it to who has the process's own ids. */
static uint64_t written_by(int proc, const char *pid) {
    struct stat status;
    char name[32], text[512];
    if (strlen(pid) > 16 || fstatat(proc, pid, &status, 0) != 0) return 0;
    snprintf(name, sizeof name, "%s/io", pid);
    setfsgid(status.st_gid);
    setfsuid(status.st_uid);
    int fd = openat(proc, name, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0) close(fd);
    setfsuid(geteuid());
    setfsgid(getegid());
    if (length <= 0) return 0;
    text[length] = '\0';
    return number_behind(text, "\nwrite_bytes: ");
}

/* What the sandbox ever wrote, memory file systems left out: who ended counts with who reaped it. Some of it counts twice. */
static uint64_t written(void) {
    uint64_t sum = *told_bytes;
    int proc = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (proc < 0) return sum;
    walk_begin(&walk, proc, 1);
    const char *name;
    while ((name = walk_next(&walk)) != NULL)
        if (name[0] >= '1' && name[0] <= '9') sum += written_by(proc, name);
    walk_end(&walk);
    return sum;
}

static int exceeds(uint64_t used, uint64_t limit) { return limit > 0 && used > limit; }

/* What is left to a limit; past it, all of it. */
static uint64_t left_to(uint64_t used, uint64_t limit) { return limit > used ? limit - used : limit; }

/* Publishes what a walk found: whether that trips. */
static int judge(const struct used *used) {
    uint64_t inodes = (used->inode_parts + WHOLE / 2) / WHOLE, most_bytes = limit_bytes, most_inodes = limit_inodes;
    uint64_t before_bytes = used_bytes, before_inodes = used_inodes;
    used_bytes = used->bytes;
    used_inodes = inodes;
    if (used->too_deep || exceeds(used->bytes, 2 * most_bytes) || exceeds(inodes, 2 * most_inodes)) return most_bytes > 0;
    return (exceeds(used->bytes, most_bytes) && used->bytes > before_bytes) || (exceeds(inodes, most_inodes) && inodes > before_inodes);
}

static void walk_once(void) {
    struct used used = {0, 0, 0};
    count_tree(&used);
    count_unlinked(&used);
    if (judge(&used)) eventfd_write(trip_fd, 1);
}

struct schedule {
    uint64_t walked_ms, cost_ms; /* when the last walk ended and what it cost of the CPU */
    uint64_t written, most_free; /* in bytes: before it; and the most that was free since */
};

/* A walk costs what the files of the image are many, and most calls write little: there is one when the sandbox wrote what could be an
 * eighth of what is left to its limits. A process may hide what it writes, so the disk as a whole is looked at too, and now and then there
 * is a walk for nothing. */
static int is_due(struct schedule *last) {
    uint64_t since = now_ms(CLOCK_MONOTONIC) - last->walked_ms, period = last->cost_ms * SHARE, now_free = free_bytes();
    uint64_t left = left_to(used_bytes, limit_bytes), eighth = left / 8, now_written = written();
    uint64_t wrote = now_written > last->written ? now_written - last->written : 0;
    if (limit_inodes > 0 && left_to(used_inodes, limit_inodes) / 8 * WATCH_INODE_BYTES < eighth)
        eighth = left_to(used_inodes, limit_inodes) / 8 * WATCH_INODE_BYTES;
    if (period < PERIOD_MS) period = PERIOD_MS;
    if (period > LONGEST_MS) period = LONGEST_MS;
    if (now_free > last->most_free) last->most_free = now_free;
    if (since >= LONGEST_MS) return 1;
    if (since < (wrote > left / 2 ? last->cost_ms * HURRIED_SHARE : period)) return 0;
    return wrote > eighth || last->most_free - now_free > 2 * left || exceeds(used_bytes, limit_bytes) || exceeds(used_inodes, limit_inodes);
}

/* Until something is active. The flag is set before `active` is looked at, so no waking is missed. */
static void park(void) {
    eventfd_t wakings;
    parked = 1;
    if (!active) eventfd_read(wake_fd, &wakings);
    parked = 0;
}

static void *watch(void *unused) {
    struct schedule last = {now_ms(CLOCK_MONOTONIC), 0, written(), free_bytes()};
    (void)unused;
    for (;;) {
        if (!active) park();
        poll(NULL, 0, LOOK_MS);
        if (limit_bytes == 0 || !is_due(&last)) continue;
        uint64_t began_ms = now_ms(CLOCK_THREAD_CPUTIME_ID);
        last.written = written();
        last.most_free = free_bytes();
        walk_once();
        last.walked_ms = now_ms(CLOCK_MONOTONIC);
        last.cost_ms = now_ms(CLOCK_THREAD_CPUTIME_ID) - began_ms;
    }
    return NULL;
}

/* The thread takes no signal: they are the poll loop's. */
static int start_thread(void) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, &attributes, watch, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    errno = error;
    return error == 0 ? 0 : -1;
}

static int start(void) {
    struct stat root;
    if (stat("/", &root) != 0) return -1;
    root_device = root.st_dev;
    clock_gettime(CLOCK_REALTIME_COARSE, &began);
    if (told_bytes == NULL) {
        void *shared = mmap(NULL, sizeof *told_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (shared == MAP_FAILED) return -1;
        told_bytes = shared;
    }
    wake_fd = eventfd(0, EFD_CLOEXEC);
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd >= 0 && fd >= 0) {
        trip_fd = fd;
        if (start_thread() == 0) return 0;
    }
    int why = errno;
    if (fd >= 0) close(fd);
    if (wake_fd >= 0) close(wake_fd);
    trip_fd = wake_fd = -1;
    errno = why;
    return -1;
}

int watch_configure(uint32_t disk_mib, uint32_t inodes) {
    limit_bytes = (uint64_t)disk_mib << 20;
    limit_inodes = inodes;
    if (trip_fd >= 0) return trip_fd;
    if (disk_mib == 0) return -2;
    return start() < 0 ? -1 : trip_fd;
}

void watch_active(int now) {
    active = now;
    if (now && parked && wake_fd >= 0) eventfd_write(wake_fd, 1);
}

void watch_wrote(uint64_t bytes) {
    if (told_bytes != NULL) *told_bytes += bytes;
}

int watch_tripped(void) {
    eventfd_t trips;
    return trip_fd >= 0 && eventfd_read(trip_fd, &trips) == 0;
}

void watch_used(uint64_t *bytes, uint64_t *inodes) {
    *bytes = used_bytes;
    *inodes = used_inodes;
}
