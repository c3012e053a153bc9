#define _GNU_SOURCE
#include "paths.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "watch.h"

enum { MAX_LINKS = 1 << 20, SHOWN = 1024, DIRECTORY = O_PATH | O_DIRECTORY | O_CLOEXEC };

int write_fully(int fd, const void *bytes, size_t size) {
    for (const char *at = bytes; size > 0;) {
        ssize_t wrote = write(fd, at, size);
        if (wrote < 0 && errno != EINTR) return -1;
        if (wrote > 0) at += wrote, size -= (size_t)wrote;
    }
    return 0;
}

static void say(const char *before, const char *what, const char *reason) {
    char line[SHOWN + 256];
    int length = snprintf(line, sizeof line, "%s%.*s: %c%.200s", before, SHOWN, what, tolower((unsigned char)reason[0]), reason + 1);
    for (int i = 0; i < length; i++)
        if (iscntrl((unsigned char)line[i])) line[i] = '?';
    line[length] = '\n';
    write_fully(2, line, (size_t)length + 1);
}

int complain(const char *path, const char *reason) {
    say(path[0] == '/' ? "" : "/", path, reason);
    return 1;
}

int complain_as(const char *path, int error) {
    complain(path, strerror(error));
    return error;
}

int complain_of(const char *what, const char *reason) {
    say("", what, reason);
    return 1;
}

/* ---- ownership ---- */

static int is_owned(const struct stat *status, const struct files_owner *owner) {
    return status->st_uid == owner->uid && status->st_gid == owner->gid;
}

int give(int fd, const struct files_owner *owner) {
    struct stat status;
    if (fstat(fd, &status) < 0) return -1;
    return is_owned(&status, owner) ? 0 : fchown(fd, owner->uid, owner->gid);
}

int give_name(int parent, const char *name, const struct files_owner *owner) {
    struct stat status;
    if (fstatat(parent, name, &status, AT_SYMLINK_NOFOLLOW) < 0) return -1;
    return is_owned(&status, owner) ? 0 : fchownat(parent, name, owner->uid, owner->gid, AT_SYMLINK_NOFOLLOW);
}

/* ---- links that this call made ---- */

struct link_id {
    dev_t device;
    ino_t inode; /* 0: free */
};

static struct link_id *links;
static size_t links_size, links_used; /* a power of two, at most half of it used */

static struct link_id *link_place(dev_t device, ino_t inode) {
    size_t at = (size_t)((uint64_t)inode * 0x9E3779B97F4A7C15u >> 32);
    for (;; at++) {
        struct link_id *place = &links[at & (links_size - 1)];
        if (place->inode == 0 || (place->inode == inode && place->device == device)) return place;
    }
}

static int grow_links(void) {
    struct link_id *old = links;
    size_t old_size = links_size;
    if (links_used >= MAX_LINKS) return -1;
    struct link_id *grown = calloc(old_size ? old_size * 2 : 256, sizeof *grown);
    if (grown == NULL) return -1;
    links = grown;
    links_size = old_size ? old_size * 2 : 256;
    for (size_t i = 0; i < old_size; i++)
        if (old[i].inode != 0) *link_place(old[i].device, old[i].inode) = old[i];
    free(old);
    return 0;
}

int remember_link(const struct stat *status) {
    if (links_used * 2 >= links_size && grow_links() < 0) return -1;
    struct link_id *place = link_place(status->st_dev, status->st_ino);
    if (place->inode == 0) links_used++;
    place->device = status->st_dev;
    place->inode = status->st_ino;
    return 0;
}

static int made_here(const struct stat *status) {
    return links_size > 0 && link_place(status->st_dev, status->st_ino)->inode != 0;
}

/* ---- directories ---- */

static uid_t user;

void paths_of(const struct files_owner *owner) { user = owner->uid; }

/* Whether the link could lead a user, through us, to where it may not write itself. */
static int leads_out(const struct stat *link, int directory) {
    struct stat status;
    return user != geteuid() && link->st_uid != geteuid() && (fstat(directory, &status) < 0 || status.st_uid != user);
}

/* A directory of ours, or an old link to one: an O_PATH descriptor, or -1 with errno (ELOOP: a link that is not followed). */
static int open_directory(int parent, const char *name, enum follow follow) {
    struct stat status;
    int fd = openat(parent, name, DIRECTORY | O_NOFOLLOW);
    if (fd >= 0 || (errno != ENOTDIR && errno != ELOOP)) return fd;
    if (fstatat(parent, name, &status, AT_SYMLINK_NOFOLLOW) < 0) return -1;
    errno = S_ISLNK(status.st_mode) ? ELOOP : ENOTDIR;
    if (!S_ISLNK(status.st_mode) || follow == FOLLOW_NONE || made_here(&status)) return -1;
    fd = openat(parent, name, DIRECTORY);
    if (fd < 0 || !leads_out(&status, fd)) return fd;
    close(fd);
    errno = ELOOP;
    return -1;
}

static int mkdir_owned(int parent, const char *name, const struct files_owner *owner) {
    if (mkdirat(parent, name, 0755) < 0) return errno == EEXIST ? 0 : -1;
    watch_wrote(WATCH_INODE_BYTES);
    return give_name(parent, name, owner);
}

int make_directory(int parent, const char *name, const struct files_owner *owner) {
    int path = open_directory(parent, name, FOLLOW_OLD);
    if (path < 0) {
        if (errno != ENOENT && errno != ENOTDIR && errno != ELOOP) return -1;
        if (unlinkat(parent, name, 0) < 0 && errno != ENOENT) return -1;
        if (mkdir_owned(parent, name, owner) < 0) return -1;
        return openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    }
    int fd = openat(path, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    close(path);
    return fd;
}

void plain_path(const char *path, char *into) {
    char *end = into;
    while (*path != '\0') {
        size_t length = strcspn(path, "/");
        if (length > 0 && !(length == 1 && path[0] == '.')) {
            if (end > into) *end++ = '/';
            memmove(end, path, length);
            end += length;
        }
        path += length;
        path += strspn(path, "/");
    }
    *end = '\0';
}

/* Where the last call went, so that thousands of files of one directory cost one resolution. */
static char last_path[65536];
static int last_fd = -1;
static enum follow last_follow;

static int step(int from, const char *name, enum follow follow, const struct files_owner *owner) {
    int fd = open_directory(from, name, follow);
    if (fd >= 0 || errno != ENOENT || owner == NULL) return fd;
    return mkdir_owned(from, name, owner) < 0 ? -1 : open_directory(from, name, follow);
}

/* Goes down `directory`, a plain path. */
static int resolve(const char *directory, enum follow follow, const struct files_owner *owner) {
    char name[256];
    int fd = open("/", DIRECTORY);
    while (fd >= 0 && *directory != '\0') {
        size_t length = strcspn(directory, "/");
        if (length >= sizeof name) {
            close(fd);
            errno = ENAMETOOLONG;
            return -1;
        }
        memcpy(name, directory, length);
        name[length] = '\0';
        directory += length + (directory[length] == '/');
        int below = step(fd, name, follow, owner), why = errno;
        close(fd);
        errno = why;
        fd = below;
    }
    return fd;
}

static int climbs(const char *plain) {
    for (const char *at = plain; *at != '\0'; at += strcspn(at, "/"), at += *at == '/')
        if (strncmp(at, "..", 2) == 0 && (at[2] == '/' || at[2] == '\0')) return 1;
    return 0;
}

static int refuse(const char *path, const char *reason) {
    complain(path, reason);
    return PATH_REFUSED;
}

int parent_directory(const char *path, enum follow follow, const struct files_owner *owner, const char **name) {
    static char plain[sizeof last_path];
    if (strlen(path) >= sizeof plain) return refuse(path, "a path too long");
    plain_path(path, plain);
    if (climbs(plain)) return refuse(path, "a path with .. in it");
    *name = plain[0] == '\0' ? "." : plain;
    char *slash = strrchr(plain, '/');
    if (slash != NULL) {
        *slash = '\0';
        *name = slash + 1;
    }
    const char *directory = slash == NULL ? "" : plain;
    if (last_fd >= 0 && follow == last_follow && strcmp(directory, last_path) == 0) return last_fd;
    if (last_fd >= 0) close(last_fd);
    last_fd = resolve(directory, follow, owner);
    last_follow = follow;
    if (last_fd < 0) return errno == ELOOP ? refuse(path, "a link is among its parents") : PATH_FAILED;
    strcpy(last_path, directory);
    return last_fd;
}
