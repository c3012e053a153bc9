#include "request.h"

#include <stdlib.h>
#include <string.h>

#include "frame.h"
#include "spawn.h"

/* What is left of a payload. `bad` sticks: whatever is read after it is zero or empty, and the caller looks once at the end. */
struct reader {
    uint8_t *at, *end;
    bool bad;
};

static const uint8_t *take(struct reader *reader, size_t count) {
    static const uint8_t nothing[8];
    if (reader->bad || (size_t)(reader->end - reader->at) < count) {
        reader->bad = true;
        return nothing;
    }
    reader->at += count;
    return reader->at - count;
}

static char *take_string(struct reader *reader) {
    static char empty[1];
    uint8_t *end = reader->bad ? NULL : memchr(reader->at, '\0', (size_t)(reader->end - reader->at));
    if (end == NULL) {
        reader->bad = true;
        return empty;
    }
    char *string = (char *)reader->at;
    reader->at = end + 1;
    return string;
}

/* 0, or the code of an ERROR. */
static int take_strings(struct reader *reader, struct strings *strings, uint32_t max) {
    uint32_t count = get32(take(reader, 4));
    if (reader->bad || count > (size_t)(reader->end - reader->at)) /* each takes a byte at least */
        return ERROR_BAD_REQUEST;
    if (count > max)
        return ERROR_TOO_LARGE;
    strings->items = malloc((count + 2) * sizeof(char *));
    if (strings->items == NULL)
        return ERROR_FULL;
    for (strings->count = 0; strings->count < count; strings->count++)
        strings->items[strings->count] = take_string(reader);
    strings->items[count] = strings->items[count + 1] = NULL;
    return 0;
}

static bool all_name_values(const struct strings *env) {
    for (uint32_t i = 0; i < env->count; i++)
        if (env->items[i][0] == '=' || strchr(env->items[i], '=') == NULL)
            return false;
    return true;
}

static bool arguments_fit(const struct run_request *request) {
    switch (request->kind) {
    case KIND_EXEC:
        return request->argv.count >= 1;
    case KIND_SESSION:
        return request->argv.count == 2 && request->session[0] != '\0' && request->argv.items[0][0] != '\0';
    case KIND_READ:
        return request->argv.count == 1;
    case KIND_WRITE:
        return request->argv.count == 2;
    default:
        return true;
    }
}

static int decode_run(struct reader *reader, struct run_request *request) {
    request->kind = *take(reader, 1);
    request->timeout_ms = get32(take(reader, 4));
    request->cap = get32(take(reader, 4));
    request->flood = get64(take(reader, 8));
    request->user = take_string(reader);
    request->workdir = take_string(reader);
    request->session = take_string(reader);
    int refused = take_strings(reader, &request->argv, ARGUMENTS_MAX);
    if (refused == 0)
        refused = take_strings(reader, &request->env, ENV_MAX);
    if (refused != 0)
        return refused;
    bool right = !reader->bad && reader->at == reader->end && request->kind < KIND_COUNT && request->cap <= CAP_MAX_BYTES;
    return right && all_name_values(&request->env) && arguments_fit(request) ? 0 : ERROR_BAD_REQUEST;
}

int run_decode(struct run_request *request, uint8_t *bytes, size_t length) {
    struct reader reader = {.at = bytes, .end = bytes + length};
    *request = (struct run_request){0};
    int refused = decode_run(&reader, request);
    if (refused != 0)
        run_free(request);
    return refused;
}

void run_free(struct run_request *request) {
    free(request->argv.items);
    free(request->env.items);
    request->argv.items = request->env.items = NULL;
}

int configure_decode(struct configure_request *request, uint8_t *bytes, size_t length) {
    struct reader reader = {.at = bytes, .end = bytes + length};
    *request = (struct configure_request){0};
    request->disk_mib = get32(take(&reader, 4));
    request->inodes = get32(take(&reader, 4));
    request->user = take_string(&reader);
    request->workdir = take_string(&reader);
    int refused = take_strings(&reader, &request->env, ENV_MAX);
    if (refused == 0 && (reader.bad || reader.at != reader.end || !all_name_values(&request->env)))
        refused = ERROR_BAD_REQUEST;
    if (refused != 0)
        configure_free(request);
    return refused;
}

void configure_free(struct configure_request *request) {
    free(request->env.items);
    request->env.items = NULL;
}
