#include "message.h"

#include <stdbool.h>
#include <string.h>

#include "memory.h"
#include "request.h"

enum { OPEN_MAX = 8 };

/* One that is not whole yet. call 0 is a call as well: `open` says whether there is one. */
struct message {
    uint64_t call;
    uint8_t type;
    bool open, refused;
    uint8_t *bytes;
    size_t size, length;
};

static struct message messages[OPEN_MAX];
static struct message *whole;

static void close_message(struct message *message) {
    memory_resize(message->bytes, message->size, 0);
    *message = (struct message){0};
}

void message_done(void) {
    if (whole != NULL)
        close_message(whole);
    whole = NULL;
}

void messages_drop(void) {
    for (int i = 0; i < OPEN_MAX; i++)
        close_message(&messages[i]);
    whole = NULL;
}

/* The one that this frame goes on with, else a free one, else NULL. */
static struct message *find(const struct frame *frame) {
    struct message *unused = NULL;
    for (int i = 0; i < OPEN_MAX; i++) {
        if (!messages[i].open)
            unused = &messages[i];
        else if (messages[i].call == frame->call && messages[i].type == frame->type)
            return &messages[i];
    }
    return unused;
}

static int append(struct message *message, const struct frame *frame) {
    size_t length = message->length + frame->length;
    if (length > RUN_MAX_BYTES)
        return ERROR_TOO_LARGE;
    if (length > message->size) {
        size_t size = length * 2 < RUN_MAX_BYTES ? length * 2 : RUN_MAX_BYTES;
        uint8_t *made = memory_resize(message->bytes, message->size, size);
        if (made == NULL)
            return ERROR_FULL;
        message->bytes = made;
        message->size = size;
    }
    if (frame->length > 0)
        memcpy(message->bytes + message->length, frame->payload, frame->length);
    message->length = length;
    return 0;
}

/* The whole of a message is changed in place by who reads it: the parser's own buffer is good for that. */
static int add_only(const struct frame *frame, uint8_t **bytes, size_t *length) {
    *bytes = (uint8_t *)frame->payload;
    *length = frame->length;
    return 1;
}

int message_add(const struct frame *frame, uint8_t **bytes, size_t *length) {
    struct message *message = find(frame);
    bool more = frame->flags & FLAG_MORE;
    if (message == NULL && more)
        return -ERROR_FULL;
    if (!more && (message == NULL || !message->open))
        return add_only(frame, bytes, length);
    message->open = true;
    message->call = frame->call;
    message->type = frame->type;
    int refused = message->refused ? 0 : append(message, frame);
    bool dropped = message->refused || refused != 0;
    message->refused = dropped;
    if (dropped) {
        if (!more)
            close_message(message);
        return -refused;
    }
    if (more)
        return 0;
    whole = message;
    *bytes = message->bytes;
    *length = message->length;
    return 1;
}
