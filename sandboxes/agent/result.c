#include "result.h"

#include "call.h"
#include "link.h"

enum { RESULT_HEADER_BYTES = 48 };

static struct call *first, **last = &first;

void result_send(struct call *call) {
    if (call->sending)
        return;
    call->sending = true;
    call->sent = 0;
    call->out_next = NULL;
    *last = call;
    last = &call->out_next;
}

void result_drop(struct call *call) {
    struct call **at = &first;
    if (!call->sending)
        return;
    while (*at != call)
        at = &(*at)->out_next;
    *at = call->out_next;
    if (last == &call->out_next)
        last = at;
    call->sending = false;
}

void results_drop_all(void) {
    while (first != NULL)
        result_drop(first);
}

static size_t kept(const struct capture *capture) { return capture->head_length + capture->tail_length; }

static void put_capture(uint8_t *at, const struct capture *capture) {
    put64(at, capture->printed);
    put32(at + 8, (uint32_t)capture->head_length);
    put32(at + 12, (uint32_t)capture->tail_length);
}

static void put_header(uint8_t *at, const struct call *call) {
    at[0] = call->how;
    at[1] = call->flags;
    put16(at + 2, 0);
    put32(at + 4, (uint32_t)call->code);
    put64(at + 8, (uint64_t)call->wall_us);
    put_capture(at + 16, &call->out);
    put_capture(at + 32, &call->err);
}

/* Copies the result's bytes from `sent` on, as many as a frame takes; how many. */
static size_t copy_result(const struct call *call, uint8_t *at) {
    size_t done = 0, offset = call->sent;
    if (offset == 0) {
        put_header(at, call);
        done = RESULT_HEADER_BYTES;
    } else {
        offset -= RESULT_HEADER_BYTES;
    }
    size_t out = kept(&call->out);
    if (offset < out)
        done += capture_copy(&call->out, offset, at + done, PAYLOAD_MAX - done);
    offset = call->sent + done - RESULT_HEADER_BYTES;
    if (offset >= out && done < PAYLOAD_MAX)
        done += capture_copy(&call->err, offset - out, at + done, PAYLOAD_MAX - done);
    return done;
}

void results_pump(void) {
    uint8_t *at;
    while (first != NULL && (at = attacher_space()) != NULL) {
        struct call *call = first;
        size_t length = copy_result(call, at);
        call->sent += length;
        bool more = call->sent < RESULT_HEADER_BYTES + kept(&call->out) + kept(&call->err);
        attacher_commit(RESULT, more ? FLAG_MORE : 0, call->id, (uint32_t)length);
        if (!more)
            result_drop(call);
    }
}
