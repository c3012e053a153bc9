/* The floor that sandboxes are measured against: frames over stdin and stdout, fork, exec, two pipes, waitpid, and nothing else.
 * No limits, deadlines, sessions, users, fences or kept results; one call at a time; it trusts whoever speaks to it.
 *
 * To it:   u32 length, then u8 what and the rest: 'X' NUL-terminated strings of argv; 'P' path NUL content; 'G' path NUL.
 * From it: u32 length, then u32 status and the rest: for 'X' u32 bytes of stdout, stdout, stderr; for 'G' the file.
 * Little-endian. Argument `--pause`: wait for ever. */
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char chunk[1 << 16];

struct buffer {
    char *bytes;
    size_t used, room;
};

static void take(void *into, size_t length) {
    for (ssize_t n; length > 0; into = (char *)into + n, length -= (size_t)n)
        if ((n = read(0, into, length)) <= 0) exit(0);
}

static void give(int fd, const void *from, size_t length) {
    for (ssize_t n; length > 0; from = (const char *)from + n, length -= (size_t)n)
        if ((n = write(fd, from, length)) <= 0) exit(1);
}

static void answer(uint32_t status, const struct buffer *parts, int count) { /* the first part with the head, in one write */
    uint32_t head[2] = {4, status};
    size_t first = count ? parts[0].used : 0;
    for (int i = 0; i < count; i++) head[0] += (uint32_t)parts[i].used;
    memcpy(chunk, head, sizeof head);
    if (first) memcpy(chunk + sizeof head, parts[0].bytes, first);
    give(1, chunk, sizeof head + first);
    for (int i = 1; i < count; i++) give(1, parts[i].bytes, parts[i].used);
}

static int drain(int fd, struct buffer *into) { /* 0 at end of file */
    if (into->room - into->used < sizeof chunk) into->bytes = realloc(into->bytes, into->room = 2 * into->room + sizeof chunk);
    ssize_t n = read(fd, into->bytes + into->used, into->room - into->used);
    if (n > 0) into->used += (size_t)n;
    return n > 0;
}

static void run(char *strings, size_t length) {
    static struct buffer outputs[3]; /* the length of stdout, stdout, stderr */
    char *argv[64] = {0};
    int out[2], err[2], status = 0, count = 0;
    for (char *at = strings; at < strings + length && count < 63; at += strlen(at) + 1) argv[count++] = at;
    if (pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC)) exit(1);
    pid_t child = fork();
    if (child == 0) {
        dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), 0), dup2(out[1], 1), dup2(err[1], 2);
        execvp(argv[0], argv);
        _exit(127);
    }
    close(out[1]), close(err[1]);
    outputs[1].used = outputs[2].used = 0;
    struct pollfd ends[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
    for (int open_ends = 2; open_ends > 0;) {
        poll(ends, 2, -1);
        for (int i = 0; i < 2; i++)
            if (ends[i].revents && !drain(ends[i].fd, &outputs[i + 1])) close(ends[i].fd), ends[i].fd = -1, open_ends--;
    }
    waitpid(child, &status, 0);
    uint32_t printed = (uint32_t)outputs[1].used;
    outputs[0] = (struct buffer){(char *)&printed, sizeof printed, 0};
    answer(WIFEXITED(status) ? (uint32_t)WEXITSTATUS(status) : 128 + (uint32_t)WTERMSIG(status), outputs, 3);
}

static size_t take_path(char *path, size_t length) { /* how much of the frame is left */
    size_t used = 0;
    do take(path + used, 1);
    while (path[used++] != 0 && used < length && used < 4096);
    return length - used;
}

static void put(size_t length) {
    char path[4096];
    size_t left = take_path(path, length);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    for (size_t n; left > 0; left -= n) {
        take(chunk, n = left < sizeof chunk ? left : sizeof chunk);
        give(fd, chunk, n);
    }
    close(fd);
    answer(0, NULL, 0);
}

static void get(size_t length) {
    char path[4096];
    struct stat facts;
    take_path(path, length);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fstat(fd, &facts)) exit(1);
    uint32_t head[2] = {4 + (uint32_t)facts.st_size, 0};
    give(1, head, sizeof head);
    for (ssize_t n; (n = read(fd, chunk, sizeof chunk)) > 0;) give(1, chunk, (size_t)n);
    close(fd);
}

int main(int argc, char **argv) {
    static char strings[1 << 16];
    if (argc > 1 && !strcmp(argv[1], "--pause"))
        for (;;) pause();
    for (uint32_t length;;) {
        char what;
        take(&length, sizeof length);
        take(&what, 1);
        if (what == 'P') put(length - 1);
        else if (what == 'G') get(length - 1);
        else take(strings, length - 1), run(strings, length - 1);
    }
}
