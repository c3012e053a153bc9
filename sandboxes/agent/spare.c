#define _GNU_SOURCE
#include "spare.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "loop.h"

/* What does not fit is left to a fork. A spare costs memory and one of the sandbox's processes: it goes when nothing is called. */
enum { ORDER_BYTES = 16384, STRINGS_MAX = 512, PIPES = 3, KEEP_US = 30000000 };

struct order {
    uint32_t length;
    uint16_t argc, envc;
    bool home_given;
    char strings[ORDER_BYTES]; /* user, workdir, argv, env: each with its NUL */
};

union rights {
    char bytes[CMSG_SPACE(PIPES * sizeof(int))];
    struct cmsghdr aligned;
};

static struct order order;
static pid_t spare;
static int spare_socket = -1;
static int64_t kept_until_us;

static bool add(const char *text) {
    size_t size = strlen(text) + 1;
    if (size > sizeof order.strings - order.length)
        return false;
    memcpy(order.strings + order.length, text, size);
    order.length += (uint32_t)size;
    return true;
}

static bool write_order(const struct spawn *spawn) {
    size_t envc = 0;
    while (spawn->env[envc] != NULL)
        envc++;
    if (spawn->argc + envc + 3 > STRINGS_MAX)
        return false;
    order.length = 0;
    order.argc = (uint16_t)spawn->argc;
    order.envc = (uint16_t)envc;
    order.home_given = spawn->home_given;
    bool fits = add(spawn->user) && add(spawn->workdir);
    for (int i = 0; fits && i < spawn->argc; i++)
        fits = add(spawn->argv[i]);
    for (size_t i = 0; fits && i < envc; i++)
        fits = add(spawn->env[i]);
    return fits;
}

static void put_rights(struct msghdr *message, const struct spawn *spawn) {
    int pipes[PIPES] = {spawn->in, spawn->out, spawn->err};
    struct cmsghdr *head = CMSG_FIRSTHDR(message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof pipes);
    memcpy(CMSG_DATA(head), pipes, sizeof pipes);
}

pid_t spare_send(const struct spawn *spawn, int *status) {
    union rights rights = {{0}};
    if (spare == 0 || spawn->kind != KIND_EXEC || !write_order(spawn))
        return 0;
    struct iovec part = {&order, offsetof(struct order, strings) + order.length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof rights};
    put_rights(&message, spawn);
    kill(spare, SIGCONT); /* the sandbox may have stopped it */
    if (sendmsg(spare_socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        spare_drop();
        return 0;
    }
    pid_t pid = spare;
    *status = spare_socket;
    spare = 0;
    return pid;
}

/* Cuts the strings into two arrays that end with NULL; the second has one more free place. */
static void read_order(struct spawn *spawn) {
    static char *strings[STRINGS_MAX + 4];
    char **next = strings, *text = order.strings;
    *spawn = (struct spawn){.kind = KIND_EXEC, .argc = order.argc, .home_given = order.home_given, .control = -1, .script = -1};
    spawn->user = text;
    spawn->workdir = text += strlen(text) + 1;
    spawn->argv = next;
    for (int i = 0; i < order.argc; i++)
        *next++ = text += strlen(text) + 1;
    *next++ = NULL;
    spawn->env = next;
    for (int i = 0; i < order.envc; i++)
        *next++ = text += strlen(text) + 1;
    next[0] = next[1] = NULL;
}

bool spare_receive(int socket, struct spawn *spawn) {
    union rights rights;
    struct iovec part = {&order, sizeof order};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof rights};
    ssize_t length;
    do
        length = recvmsg(socket, &message, 0); /* the pipes get the lowest numbers that are free: 0, 1 and 2 */
    while (length < 0 && errno == EINTR);
    if (length <= 0 || message.msg_controllen != sizeof rights)
        return false;
    read_order(spawn);
    return true;
}

void spare_keep(pid_t pid, int socket) {
    spare_drop();
    spare = pid;
    spare_socket = socket;
    kept_until_us = now_us() + KEEP_US;
}

void spare_drop(void) {
    if (spare != 0)
        close(spare_socket);
    spare = 0;
}

void spare_reaped(pid_t pid) {
    if (pid == spare)
        spare_drop();
}

bool spare_is(pid_t pid) { return pid == spare; }

void spare_tick(int64_t now) {
    if (spare != 0 && kept_until_us <= now)
        spare_drop();
}

int64_t spare_deadline(void) { return spare != 0 ? kept_until_us : 0; }
