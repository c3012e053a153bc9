#define _GNU_SOURCE
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "paths.h"
#include "tar.h"
#include "walk.h"
#include "watch.h"

enum { CHUNK = 65536, NEW_FILE = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC };

static struct walk walk;
static struct tar_member member;

/* ---- pack: a tar of paths on fd 1 ---- */

static unsigned char held[CHUNK]; /* written together: small files cost no write each */
static size_t held_size;

static int flush(void) {
    size_t size = held_size;
    held_size = 0;
    return write_fully(1, held, size);
}

static int put(const void *bytes, size_t size) {
    for (const char *at = bytes; size > 0;) {
        size_t here = size < CHUNK - held_size ? size : CHUNK - held_size;
        memcpy(held + held_size, at, here);
        held_size += here;
        at += here;
        size -= here;
        if (held_size == CHUNK && flush() < 0) return -1;
    }
    return 0;
}

static int put_zeros(uint64_t count) {
    static const unsigned char zeros[TAR_BLOCK];
    for (; count > 0; count -= count < TAR_BLOCK ? count : TAR_BLOCK)
        if (put(zeros, count < TAR_BLOCK ? (size_t)count : TAR_BLOCK) < 0) return -1;
    return 0;
}

static int put_header(enum tar_kind kind, const struct stat *status) {
    member.kind = kind;
    member.mode = status->st_mode & 07777;
    member.size = kind == TAR_FILE ? (uint64_t)status->st_size : 0;
    member.changed = status->st_mtim;
    return tar_header(&member, status->st_uid, status->st_gid, put);
}

/* Exactly `size` bytes, as the header says: what the file lacks by now is zeros, what it gained is left out. */
static int put_content(int fd, uint64_t size) {
    static unsigned char chunk[CHUNK];
    uint64_t left = size;
    while (left > 0) {
        ssize_t got = read(fd, chunk, left < CHUNK ? (size_t)left : CHUNK);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        if (put(chunk, (size_t)got) < 0) return -1;
        left -= (uint64_t)got;
    }
    return put_zeros(left + tar_padding(size));
}

static int pack_file(int parent, const char *name) {
    struct stat status;
    int fd = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) return 0;
    int done = 0;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) {
        done = put_header(TAR_FILE, &status);
        if (done == 0) done = put_content(fd, member.size);
    }
    close(fd);
    return done;
}

static int pack_link(int parent, const char *name, const struct stat *status) {
    ssize_t length = readlinkat(parent, name, member.link, TAR_PATH - 1);
    if (length < 0) return 0;
    member.link[length] = '\0';
    int done = put_header(TAR_LINK, status);
    member.link[0] = '\0';
    return done;
}

/* One entry, whose path is in `member`: 1 when it is a directory to walk into, 0, -1 when the pipe is closed. */
static int pack_entry(int parent, const char *name) {
    struct stat status;
    if (fstatat(parent, name, &status, AT_SYMLINK_NOFOLLOW) != 0) return 0;
    if (S_ISREG(status.st_mode)) return pack_file(parent, name);
    if (S_ISLNK(status.st_mode)) return pack_link(parent, name, &status);
    if (!S_ISDIR(status.st_mode)) return 0;
    size_t length = strlen(member.path);
    if (length == 0) return 1; /* `/` itself needs no entry */
    if (length + 2 > TAR_PATH) return 1;
    memcpy(member.path + length, "/", 2);
    int done = put_header(TAR_DIRECTORY, &status);
    member.path[length] = '\0';
    return done < 0 ? -1 : 1;
}

/* Appends a name to the member's path: the length before, or -1 when it is too long. */
static long append_name(const char *name) {
    size_t length = strlen(member.path), more = strlen(name);
    if (length + more + 2 > TAR_PATH) return -1;
    if (length > 0) member.path[length] = '/';
    memcpy(member.path + length + (length > 0), name, more + 1);
    return (long)length;
}

static void drop_name(void) {
    char *slash = strrchr(member.path, '/');
    *(slash ? slash : member.path) = '\0';
}

/* What is below the directory where the walk starts, whose path is in `member`. */
static int pack_below(void) {
    while (walk.depth > 0) {
        const char *name = walk_next(&walk);
        if (name == NULL) {
            walk_up(&walk);
            if (walk.depth > 0) drop_name();
            continue;
        }
        long before = append_name(name);
        if (before < 0) return complain(member.path, "paths are too long below here");
        int entry = pack_entry(walk_fd(&walk), name);
        if (entry < 0) return complain_of("stdout", strerror(errno));
        if (entry > 0 && walk_down(&walk, name) == 0) continue;
        if (entry > 0 && errno == ELOOP && walk.depth == WALK_DEPTH) return complain(member.path, "too many directories in each other");
        member.path[before] = '\0';
    }
    return 0;
}

static int pack_path(const char *path) {
    const char *name;
    if (strlen(path) + 2 > TAR_PATH) return complain(path, "a path too long");
    int parent = parent_directory(path, FOLLOW_NONE, NULL, &name);
    if (parent == PATH_REFUSED) return 1;
    if (parent < 0) return 0; /* missing */
    plain_path(path, member.path);
    int entry = pack_entry(parent, name);
    int done = entry < 0 ? complain_of("stdout", strerror(errno)) : 0;
    if (entry > 0) {
        int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd >= 0) {
            walk_begin(&walk, fd, WALK_DEPTH);
            done = pack_below();
            walk_end(&walk);
        }
    }
    return done;
}

static int pack(int count, char **paths) {
    member.link[0] = '\0';
    for (int i = 0; i < count; i++)
        if (pack_path(paths[i]) != 0) return 1;
    return put_zeros(2 * TAR_BLOCK) < 0 || flush() < 0 ? complain_of("stdout", strerror(errno)) : 0;
}

/* ---- unpack: a tar from fd 0 ---- */

/* Into a file of the sandbox: the disk watch hears of it. */
static int write_counted(int fd, const void *bytes, size_t size) {
    if (write_fully(fd, bytes, size) < 0) return -1;
    watch_wrote(size);
    return 0;
}

static struct tar_reader reader;

/* Makes room for what is no directory: 0, or a code after a line, as everything below. */
static int make_room(int parent, const char *name) {
    if (unlinkat(parent, name, 0) == 0 || errno == ENOENT) return 0;
    return complain_as(member.path, errno);
}

/* The content into `fd`. */
static int unpack_content(int fd) {
    const unsigned char *from;
    long got;
    while ((got = tar_content(&reader, &from)) > 0)
        if (write_counted(fd, from, (size_t)got) < 0) return complain_as(member.path, errno);
    return got < 0 ? complain_of("the archive", reader.error) : 0;
}

static int unpack_file(int parent, const char *name, const struct files_owner *owner) {
    struct timespec times[2] = {member.changed, member.changed};
    int fd = openat(parent, name, NEW_FILE, 0600);
    if (fd < 0 && errno == EEXIST) {
        int done = make_room(parent, name);
        if (done != 0) return done;
        fd = openat(parent, name, NEW_FILE, 0600);
    }
    if (fd < 0) return complain_as(member.path, errno);
    int done = unpack_content(fd);
    if (done == 0 && (give(fd, owner) < 0 || fchmod(fd, member.mode) < 0 || futimens(fd, times) < 0)) done = complain_as(member.path, errno);
    if (close(fd) < 0 && done == 0) done = complain_as(member.path, errno);
    if (done != 0) unlinkat(parent, name, 0);
    return done;
}

static int unpack_link(int parent, const char *name, const struct files_owner *owner) {
    struct timespec times[2] = {member.changed, member.changed};
    struct stat status;
    int done = make_room(parent, name);
    if (done != 0) return done;
    if (symlinkat(member.link, parent, name) < 0) return complain_as(member.path, errno);
    if (give_name(parent, name, owner) < 0) return complain_as(member.path, errno);
    utimensat(parent, name, times, AT_SYMLINK_NOFOLLOW);
    if (fstatat(parent, name, &status, AT_SYMLINK_NOFOLLOW) < 0) return complain_as(member.path, errno);
    return remember_link(&status) < 0 ? complain_of("the archive", "too many links") : 0;
}

/* A second name for a file; of a link there is none, since what is put below it would leave. */
static int link_file(int source, const char *target, int parent, const char *name) {
    struct stat status, there;
    if (source < 0 || fstatat(source, target, &status, AT_SYMLINK_NOFOLLOW) < 0) return complain_as(member.link, errno);
    if (!S_ISREG(status.st_mode)) return complain(member.link, "is no file to link to");
    if (fstatat(parent, name, &there, AT_SYMLINK_NOFOLLOW) == 0 && there.st_dev == status.st_dev && there.st_ino == status.st_ino) return 0;
    int done = make_room(parent, name);
    if (done != 0) return done;
    return linkat(source, target, parent, name, 0) < 0 ? complain_as(member.path, errno) : 0;
}

static int unpack_hard_link(int parent, const char *name) {
    char own_name[NAME_MAX + 1];
    const char *target;
    if (strlen(name) > NAME_MAX) return complain_as(member.path, ENAMETOOLONG);
    strcpy(own_name, name); /* it and the directory are good for one parent_directory */
    int own_parent = fcntl(parent, F_DUPFD_CLOEXEC, 3);
    if (own_parent < 0) return complain_as(member.path, errno);
    int source = parent_directory(member.link, FOLLOW_OLD, NULL, &target);
    int done = source == PATH_REFUSED ? 1 : link_file(source, target, own_parent, own_name);
    close(own_parent);
    return done;
}

static int unpack_directory(int parent, const char *name, const struct files_owner *owner) {
    int fd = make_directory(parent, name, owner);
    if (fd < 0) return complain_as(member.path, errno);
    struct timespec times[2] = {member.changed, member.changed};
    int done = fchmod(fd, member.mode) < 0 ? complain_as(member.path, errno) : 0;
    futimens(fd, times); /* good until something is put into it */
    close(fd);
    return done;
}

static int unpack_member(const struct files_owner *owner) {
    const char *name;
    if (member.kind == TAR_OTHER) return 0;
    int parent = parent_directory(member.path, FOLLOW_OLD, owner, &name);
    if (parent == PATH_REFUSED) return 1;
    if (parent < 0) return complain_as(member.path, errno);
    if (strcmp(name, ".") == 0) return member.kind == TAR_DIRECTORY ? 0 : complain_as(member.path, EISDIR);
    switch (member.kind) {
        case TAR_FILE: return unpack_file(parent, name, owner);
        case TAR_LINK: return unpack_link(parent, name, owner);
        case TAR_HARD_LINK: return unpack_hard_link(parent, name);
        default: return unpack_directory(parent, name, owner);
    }
}

static int remove_path(const char *path) {
    const char *name;
    int parent = parent_directory(path, FOLLOW_OLD, NULL, &name);
    if (parent == PATH_REFUSED) return 1;
    if (parent < 0) return 0;
    if (strcmp(name, ".") == 0) return complain(path, "cannot be removed");
    return walk_remove(&walk, parent, name) < 0 ? complain_as(path, errno) : 0;
}

static int unpack(int count, char **removed, const struct files_owner *owner) {
    int done, next;
    for (int i = 0; i < count; i++)
        if ((done = remove_path(removed[i])) != 0) return done;
    tar_open(&reader, 0);
    while ((next = tar_next(&reader, &member)) > 0) {
        if ((done = unpack_member(owner)) != 0) return done;
        watch_wrote(WATCH_INODE_BYTES);
    }
    if (next < 0) return complain_of("the archive", reader.error);
    tar_drain(&reader);
    return 0;
}

/* ---- read and write ---- */

/* Looked at before it is opened: opening a device may do something, opening a FIFO waits. */
static int read_file(const char *path) {
    static unsigned char chunk[CHUNK];
    struct stat status;
    if (stat(path, &status) < 0) return complain_as(path, errno);
    if (S_ISDIR(status.st_mode)) return complain_as(path, EISDIR);
    int fd = S_ISREG(status.st_mode) ? open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC) : -2;
    if (fd == -1) return complain_as(path, errno);
    if (fd < 0 || fstat(fd, &status) < 0 || !S_ISREG(status.st_mode)) return complain(path, "is no regular file");
    ssize_t got;
    while ((got = read(fd, chunk, CHUNK)) != 0) {
        if (got < 0 && errno != EINTR) return complain_as(path, errno);
        if (got > 0 && write_fully(1, chunk, (size_t)got) < 0) return complain_of("stdout", strerror(errno));
    }
    return 0;
}

/* fd 0 into `fd`. */
static int fill_file(int fd, const char *path) {
    static unsigned char chunk[CHUNK];
    ssize_t got;
    while ((got = read(0, chunk, CHUNK)) != 0) {
        if (got < 0 && errno != EINTR) return complain_of("stdin", strerror(errno));
        if (got > 0 && write_counted(fd, chunk, (size_t)got) < 0) return complain_as(path, errno);
    }
    return 0;
}

/* Without a name where the file system and /proc allow it, so that a write that is killed leaves nothing; else it is called `fresh`. */
static int open_fresh(int parent, const char *fresh) {
    int fd = access("/proc/self/fd", X_OK) == 0 ? openat(parent, ".", O_WRONLY | O_TMPFILE | O_CLOEXEC, 0600) : -1;
    unlinkat(parent, fresh, 0); /* left by one that was killed */
    return fd >= 0 ? fd : openat(parent, fresh, NEW_FILE, 0600);
}

static int name_fresh(int fd, int parent, const char *fresh) {
    char path[32];
    struct stat status;
    if (fstat(fd, &status) < 0 || status.st_nlink > 0) return 0;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, path, parent, fresh, AT_SYMLINK_FOLLOW);
}

/* Beside the file and then in its place: until it is whole, what was there stays. */
static int write_file(const char *path, unsigned mode, const struct files_owner *owner) {
    const char *name;
    char fresh[32];
    struct stat status;
    int parent = parent_directory(path, FOLLOW_OLD, owner, &name);
    if (parent == PATH_REFUSED) return 1;
    if (parent < 0) return complain_as(path, errno);
    if (fstatat(parent, name, &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(status.st_mode)) return complain_as(path, EISDIR);
    snprintf(fresh, sizeof fresh, ".rollway-%d", (int)getpid());
    int fd = open_fresh(parent, fresh);
    if (fd < 0) return complain_as(path, errno);
    watch_wrote(WATCH_INODE_BYTES);
    int done = fill_file(fd, path);
    if (done == 0 && (give(fd, owner) < 0 || fchmod(fd, mode) < 0 || name_fresh(fd, parent, fresh) < 0)) done = complain_as(path, errno);
    if (close(fd) < 0 && done == 0) done = complain_as(path, errno);
    if (done == 0 && renameat(parent, fresh, parent, name) < 0) done = complain_as(path, errno);
    if (done != 0) unlinkat(parent, fresh, 0);
    return done;
}

/* A walk may hold WALK_DEPTH open directories. */
static void raise_open_files(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

int files_main(int kind, int argc, char **argv, const struct files_owner *owner) {
    signal(SIGPIPE, SIG_IGN);
    umask(0);
    raise_open_files();
    paths_of(owner);
    if (chdir("/") != 0) return complain_as("/", errno);
    switch (kind) {
        case FILES_PACK: return pack(argc, argv);
        case FILES_UNPACK: return unpack(argc, argv, owner);
        case FILES_READ: return argc == 1 ? read_file(argv[0]) : complain_of("read", "takes one path");
        case FILES_WRITE: break;
        default: return complain_of("the call", "of no kind that moves files");
    }
    char *end;
    unsigned long mode = argc == 2 ? strtoul(argv[1], &end, 8) : 0;
    if (argc != 2 || end == argv[1] || *end != '\0' || mode > 07777) return complain_of("write", "takes a path and an octal mode");
    return write_file(argv[0], (unsigned)mode & 01777, owner);
}
