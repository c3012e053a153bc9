/* Whose processes a call's are: names looked up in the sandbox's own /etc/passwd and /etc/group, which may hold anything. */
#ifndef ROLLWAY_USER_H
#define ROLLWAY_USER_H

#include <stdbool.h>
#include <sys/types.h>

enum { USER_GROUPS_MAX = 256, USER_HOME_MAX = 1024 };

struct user {
    uid_t uid;
    gid_t gid;
    gid_t groups[USER_GROUPS_MAX];
    size_t group_count;
    char home[USER_HOME_MAX]; /* empty: not known */
};

/* `name`: empty for the agent's own, else NAME, UID, NAME:GROUP or UID:GID. False when there is no such user or group. */
bool user_find(struct user *user, const char *name);

bool user_is_ours(const struct user *user);

/* Becomes this user, with plain system calls only: between vfork and exec. 0, or -1 with errno. */
int user_become(const struct user *user);

#endif
