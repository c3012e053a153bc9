#define _GNU_SOURCE
#include "link.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "loop.h"
#include "memory.h"

/* Past BUSY_BYTES unsent, long messages and reading wait; the rest is for what one frame read before may still bring. */
enum { LINKS_MAX = 4, BUSY_BYTES = 256 * 1024, OUT_BYTES = 512 * 1024 };

struct link {
    struct source in, out; /* of a socket, `out` is a duplicate */
    struct parser parser;
    uint8_t *unsent;
    size_t start, end;
    uint64_t opened; /* the how manieth it is */
    bool open, over;
};

static struct link links[LINKS_MAX];
static struct source listener = {.fd = -1};
static frame_handler *handle_frame;
static ended_handler *handle_end;

static struct link *current_link;
static uint64_t current_channel;

static size_t unsent_bytes(const struct link *link) { return link->end - link->start; }

static bool busy(const struct link *link) { return unsent_bytes(link) >= BUSY_BYTES; }

static void link_close(struct link *link) {
    source_close(&link->in);
    source_close(&link->out);
    link->open = false;
    if (current_link == link)
        current_link = NULL;
    if (handle_end != NULL)
        handle_end();
}

/* Room for a whole frame at the end of what is unsent, or NULL. */
static uint8_t *out_space(struct link *link, size_t size) {
    if (link->start == link->end)
        link->start = link->end = 0;
    if (OUT_BYTES - link->end < size) {
        memmove(link->unsent, link->unsent + link->start, unsent_bytes(link));
        link->end -= link->start;
        link->start = 0;
    }
    return OUT_BYTES - link->end < size ? NULL : link->unsent + link->end;
}

static void send_short(struct link *link, uint64_t channel, uint8_t type, uint64_t call, const void *payload, uint32_t length) {
    uint8_t *at = out_space(link, HEADER_BYTES + length);
    if (at == NULL) /* only who never reads gets here, and will have to ask again */
        return;
    if (length > 0)
        memcpy(at + HEADER_BYTES, payload, length);
    frame_seal(at, &(struct frame){.type = type, .channel = channel, .call = call, .length = length});
    link->end += HEADER_BYTES + length;
}

void link_answer(struct link *link, const struct frame *asked, uint8_t type, const void *payload, uint32_t length) {
    send_short(link, asked->channel, type, asked->call, payload, length);
}

bool attached(const struct link *link, uint64_t channel) { return link == current_link && channel == current_channel && channel != 0; }

bool attach(struct link *link, uint64_t channel) {
    bool other = channel != current_channel;
    current_link = link;
    current_channel = channel;
    return other;
}

uint64_t attacher_channel(void) { return current_link != NULL ? current_channel : 0; }

void attacher_send(uint8_t type, uint64_t call, const void *payload, uint32_t length) {
    if (current_link != NULL)
        send_short(current_link, current_channel, type, call, payload, length);
}

uint8_t *attacher_space(void) {
    if (current_link == NULL || busy(current_link))
        return NULL;
    uint8_t *at = out_space(current_link, FRAME_MAX);
    return at == NULL ? NULL : at + HEADER_BYTES;
}

void attacher_commit(uint8_t type, uint8_t flags, uint64_t call, uint32_t length) {
    struct frame frame = {.type = type, .flags = flags, .channel = current_channel, .call = call, .length = length};
    frame_seal(current_link->unsent + current_link->end, &frame);
    current_link->end += HEADER_BYTES + length;
}

/* Handles what was read, until the answers are too many to go on; links_flush goes on then. */
static bool parse(struct link *link) {
    struct frame frame;
    bool any = false;
    while (link->open && !busy(link)) {
        switch (parser_next(&link->parser, &frame)) {
        case PARSER_FRAME:
            handle_frame(link, &frame);
            any = true;
            break;
        case PARSER_LOST:
            send_short(link, current_link == link ? current_channel : 0, LOST, 0, NULL, 0);
            break;
        case PARSER_EMPTY:
            if (link->over)
                link_close(link);
            return any;
        }
    }
    return any;
}

static void link_readable(struct source *source, uint32_t events) {
    struct link *link = owner_of(source, struct link, in);
    size_t size;
    (void)events;
    uint8_t *at = parser_space(&link->parser, &size);
    ssize_t count = size > 0 ? read(source->fd, at, size) : -1;
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (count <= 0)
        link->over = true;
    else
        parser_fill(&link->parser, (size_t)count);
    parse(link);
}

static void flush(struct link *link) {
    while (unsent_bytes(link) > 0) {
        ssize_t count = write(link->out.fd, link->unsent + link->start, unsent_bytes(link));
        if (count < 0) {
            if (errno != EAGAIN && errno != EINTR)
                link_close(link);
            break;
        }
        link->start += (size_t)count;
    }
}

static void link_writable(struct source *source, uint32_t events) {
    (void)events;
    flush(owner_of(source, struct link, out));
}

bool links_flush(void) {
    bool any = false;
    for (struct link *link = links; link < links + LINKS_MAX; link++) {
        if (!link->open)
            continue;
        bool was_busy = busy(link);
        flush(link);
        if (link->open && !busy(link))
            any |= parse(link);
        if (link->open)
            flush(link);
        if (!link->open)
            continue;
        any |= was_busy && !busy(link); /* what waited for room has it now, and no event will say so */
        source_want(&link->out, unsent_bytes(link) > 0 ? EPOLLOUT : 0);
        source_want(&link->in, busy(link) ? 0 : EPOLLIN);
    }
    return any;
}

static void no_block(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

static bool link_open(struct link *link, int in, int out) {
    if (link->unsent == NULL) {
        link->unsent = memory_fixed(OUT_BYTES, false);
        parser_open(&link->parser);
    }
    link->parser = (struct parser){.bytes = link->parser.bytes};
    link->start = link->end = 0;
    link->over = false;
    no_block(in);
    no_block(out);
    link->out = (struct source){.fd = -1};
    if (source_open(&link->in, in, EPOLLIN, link_readable) != 0) {
        close(out);
        return false;
    }
    link->open = source_open(&link->out, out, 0, link_writable) == 0;
    if (!link->open)
        source_close(&link->in);
    return link->open;
}

void link_stdio(frame_handler *handle, ended_handler *ended) {
    handle_frame = handle;
    handle_end = ended;
    if (!link_open(&links[0], STDIN_FILENO, STDOUT_FILENO))
        ended();
}

/* A free one, else that of the attacher who came first and is no longer the one of the moment. */
static struct link *free_link(void) {
    struct link *oldest = NULL;
    for (struct link *link = links; link < links + LINKS_MAX; link++) {
        if (!link->open)
            return link;
        if (link != current_link && (oldest == NULL || link->opened < oldest->opened))
            oldest = link;
    }
    link_close(oldest);
    return oldest;
}

static void accept_link(struct source *source, uint32_t events) {
    static uint64_t count;
    (void)events;
    int in = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (in < 0)
        return;
    int out = fcntl(in, F_DUPFD_CLOEXEC, 3);
    if (out < 0) {
        close(in);
        return;
    }
    struct link *link = free_link();
    link->opened = ++count;
    link_open(link, in, out);
}

void link_listen(int fd, frame_handler *handle) {
    handle_frame = handle;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    no_block(fd);
    source_open(&listener, fd, EPOLLIN, accept_link);
}
