#define _GNU_SOURCE
#include "user.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 8192, FILE_MAX_BYTES = 4 * 1024 * 1024 };

/* A line that is too long is left out: of a hostile file nothing but its own sandbox's users gets lost. */
struct lines {
    int fd;
    size_t start, end, total;
    char bytes[LINE_MAX_BYTES];
};

static bool lines_open(struct lines *lines, const char *path) {
    struct stat about;
    lines->start = lines->end = lines->total = 0;
    lines->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (lines->fd < 0)
        return false;
    if (fstat(lines->fd, &about) == 0 && S_ISREG(about.st_mode))
        return true;
    close(lines->fd);
    return false;
}

static bool lines_more(struct lines *lines) {
    memmove(lines->bytes, lines->bytes + lines->start, lines->end - lines->start);
    lines->end -= lines->start;
    lines->start = 0;
    if (lines->end == sizeof lines->bytes)
        lines->end = 0;
    ssize_t count = read(lines->fd, lines->bytes + lines->end, sizeof lines->bytes - lines->end);
    if (count <= 0 || (lines->total += (size_t)count) > FILE_MAX_BYTES)
        return false;
    lines->end += (size_t)count;
    return true;
}

/* The next whole line, cut at its colons into exactly `count` fields or more (the last holds the rest); NULL at the end. */
static char *lines_next(struct lines *lines) {
    for (;;) {
        char *begin = lines->bytes + lines->start;
        char *end = memchr(begin, '\n', lines->end - lines->start);
        if (end != NULL) {
            *end = '\0';
            lines->start = (size_t)(end + 1 - lines->bytes);
            return begin;
        }
        if (!lines_more(lines))
            return NULL;
    }
}

static int split(char *line, char **fields, int count) {
    int found = 0;
    while (found < count && line != NULL)
        fields[found++] = strsep(&line, ":");
    return found;
}

static bool number(const char *text, uint32_t *value) {
    if (*text == '\0')
        return false;
    uint64_t sum = 0;
    for (; *text != '\0'; text++) {
        if (*text < '0' || *text > '9' || sum > UINT32_MAX)
            return false;
        sum = sum * 10 + (uint64_t)(*text - '0');
    }
    *value = (uint32_t)sum;
    return sum < INT32_MAX;
}

/* Looks for `name`, or for the number `uid` where name is NULL. Writes the found name to `found`. */
static bool find_passwd(struct user *user, const char *name, char found[256]) {
    static struct lines lines;
    bool there = false;
    char *line, *fields[7];
    if (!lines_open(&lines, "/etc/passwd"))
        return false;
    while (!there && (line = lines_next(&lines)) != NULL) {
        uint32_t uid, gid;
        if (split(line, fields, 7) < 6 || !number(fields[2], &uid) || !number(fields[3], &gid))
            continue;
        there = name != NULL ? strcmp(fields[0], name) == 0 : uid == user->uid;
        if (!there)
            continue;
        user->uid = uid;
        user->gid = gid;
        strncpy(found, fields[0], 255);
        strncpy(user->home, fields[5], sizeof user->home - 1);
    }
    close(lines.fd);
    return there;
}

static bool find_group(struct user *user, const char *name) {
    static struct lines lines;
    bool there = false;
    char *line, *fields[4];
    if (!lines_open(&lines, "/etc/group"))
        return false;
    while (!there && (line = lines_next(&lines)) != NULL) {
        uint32_t gid;
        there = split(line, fields, 4) >= 3 && number(fields[2], &gid) && strcmp(fields[0], name) == 0;
        if (there)
            user->gid = gid;
    }
    close(lines.fd);
    return there;
}

static bool lists(char *members, const char *name) {
    for (char *member; (member = strsep(&members, ",")) != NULL;)
        if (strcmp(member, name) == 0)
            return true;
    return false;
}

static void find_groups(struct user *user, const char *name) {
    static struct lines lines;
    char *line, *fields[4];
    if (!lines_open(&lines, "/etc/group"))
        return;
    while (user->group_count < USER_GROUPS_MAX && (line = lines_next(&lines)) != NULL) {
        uint32_t gid;
        if (split(line, fields, 4) == 4 && number(fields[2], &gid) && gid != user->gid && lists(fields[3], name))
            user->groups[user->group_count++] = gid;
    }
    close(lines.fd);
}

bool user_find(struct user *user, const char *name) {
    char first[256] = "", known[256] = "";
    const char *colon = strchr(name, ':');
    size_t length = colon != NULL ? (size_t)(colon - name) : strlen(name);
    *user = (struct user){.uid = geteuid(), .gid = getegid()};
    if (*name == '\0')
        return true;
    if (length == 0 || length >= sizeof first)
        return false;
    memcpy(first, name, length);
    uint32_t value;
    if (number(first, &value)) {
        user->uid = value;
        user->gid = 0; /* as Docker has it for a number without a name */
        find_passwd(user, NULL, known);
    } else if (!find_passwd(user, first, known)) {
        return false;
    }
    if (colon != NULL) {
        if (number(colon + 1, &value))
            user->gid = value;
        else if (!find_group(user, colon + 1))
            return false;
    }
    user->groups[user->group_count++] = user->gid;
    if (colon == NULL && *known != '\0')
        find_groups(user, known);
    return true;
}

bool user_is_ours(const struct user *user) { return user->uid == geteuid() && user->gid == getegid(); }

int user_become(const struct user *user) {
    if (user_is_ours(user))
        return 0;
    if (syscall(SYS_setgroups, user->group_count, user->groups) != 0 || syscall(SYS_setresgid, user->gid, user->gid, user->gid) != 0)
        return -1;
    return (int)syscall(SYS_setresuid, user->uid, user->uid, user->uid);
}
