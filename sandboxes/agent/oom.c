#define _GNU_SOURCE
#include "oom.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int counter = -1;

/* The group's directory as /proc/self/cgroup names it, for the line that holds `controller` ("" of version 2). */
static int open_own(const char *controller, const char *root, const char *file) {
    char line[1024], path[2048];
    int found = -1;
    FILE *groups = fopen("/proc/self/cgroup", "re");
    while (groups != NULL && found < 0 && fgets(line, sizeof line, groups) != NULL) {
        char *names = strchr(line, ':'), *group = names != NULL ? strchr(names + 1, ':') : NULL;
        if (group == NULL)
            continue;
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        if (strcmp(names + 1, controller) == 0 && snprintf(path, sizeof path, "%s%s/%s", root, group, file) < (int)sizeof path)
            found = open(path, O_RDONLY | O_CLOEXEC);
    }
    if (groups != NULL)
        fclose(groups);
    return found;
}

/* Inside a container the group is mounted as the root of the tree, whatever its name says. */
void oom_open(int fd) {
    counter = fd;
    if (counter >= 0)
        fcntl(counter, F_SETFD, FD_CLOEXEC);
    if (counter < 0)
        counter = open_own("memory", "/sys/fs/cgroup/memory", "memory.oom_control");
    if (counter < 0)
        counter = open("/sys/fs/cgroup/memory/memory.oom_control", O_RDONLY | O_CLOEXEC);
    if (counter < 0)
        counter = open_own("", "/sys/fs/cgroup", "memory.events");
    if (counter < 0)
        counter = open("/sys/fs/cgroup/memory.events", O_RDONLY | O_CLOEXEC);
}

uint64_t oom_kills(void) {
    char text[512];
    ssize_t length = counter >= 0 ? pread(counter, text, sizeof text - 1, 0) : 0;
    if (length <= 0)
        return 0;
    text[length] = '\0';
    const char *field = strstr(text, "oom_kill ");
    return field != NULL ? strtoull(field + strlen("oom_kill "), NULL, 10) : 0;
}
