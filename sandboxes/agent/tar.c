#define _GNU_SOURCE
#include "tar.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

/* The places of a header's fields. */
enum {
    NAME = 0, NAME_SIZE = 100, MODE = 100, UID = 108, GID = 116, NUMBER_SIZE = 8, SIZE = 124, CHANGED = 136, LONG_SIZE = 12,
    CHECKSUM = 148, TYPE = 156, LINK = 157, MAGIC = 257, PREFIX = 345, PREFIX_SIZE = 155,
};

static const char LONG_NAME[] = "././@LongLink";
static const uint64_t MAX_SIZE = (uint64_t)1 << 60;
static const long MAX_SECONDS = (long)1 << 40; /* far past what file systems keep */

static int wrong(struct tar_reader *reader, const char *error) {
    reader->error = error;
    return -1;
}

/* ---- bytes in ---- */

void tar_open(struct tar_reader *reader, int fd) {
    reader->fd = fd;
    reader->started = 0;
    reader->error = NULL;
    reader->left = 0;
    reader->padding = 0;
    reader->next = reader->end = 0;
}

/* 1 when something is in the buffer, 0 at the end of the stream, -1. */
static int fill(struct tar_reader *reader) {
    if (reader->next < reader->end) return 1;
    ssize_t got;
    do got = read(reader->fd, reader->buffer, TAR_BUFFER);
    while (got < 0 && errno == EINTR);
    if (got < 0) return wrong(reader, "cannot be read");
    reader->next = 0;
    reader->end = (size_t)got;
    return got > 0;
}

/* Exactly `count` bytes, thrown away where `into` is NULL: 1, or -1; 0 where the stream ended before the first. */
static int take(struct tar_reader *reader, void *into, uint64_t count) {
    uint64_t taken = 0;
    while (taken < count) {
        int filled = fill(reader);
        if (filled < 0) return -1;
        if (filled == 0) return taken == 0 ? 0 : wrong(reader, "cut short");
        size_t here = reader->end - reader->next;
        if (here > count - taken) here = (size_t)(count - taken);
        if (into != NULL) memcpy((char *)into + taken, reader->buffer + reader->next, here);
        reader->next += here;
        taken += here;
    }
    return 1;
}

static int take_all(struct tar_reader *reader, void *into, uint64_t count) {
    int taken = take(reader, into, count);
    return taken == 0 && count > 0 ? wrong(reader, "cut short") : taken;
}

long tar_content(struct tar_reader *reader, const unsigned char **from) {
    if (reader->left == 0) return 0;
    int filled = fill(reader);
    if (filled <= 0) return filled < 0 ? -1 : wrong(reader, "cut short");
    size_t here = reader->end - reader->next;
    if (here > reader->left) here = (size_t)reader->left;
    *from = reader->buffer + reader->next;
    reader->next += here;
    reader->left -= here;
    return (long)here;
}

void tar_drain(struct tar_reader *reader) {
    do reader->next = reader->end;
    while (fill(reader) > 0);
}

unsigned tar_padding(uint64_t size) { return (unsigned)((TAR_BLOCK - size % TAR_BLOCK) % TAR_BLOCK); }

/* ---- headers in ---- */

/* An octal number, or GNU's base 256: 0, or -1 when it is neither or past 63 bits. */
static int number(const unsigned char *field, size_t size, uint64_t *value) {
    size_t i = 0;
    *value = 0;
    if (field[0] & 0x80) {
        if (field[0] != 0x80) return -1; /* negative, or more than this field's bytes */
        for (i = 1; i < size; i++) {
            if (*value >> 55) return -1;
            *value = *value << 8 | field[i];
        }
        return 0;
    }
    while (i < size && field[i] == ' ') i++;
    for (; i < size && field[i] >= '0' && field[i] <= '7'; i++) *value = *value << 3 | (uint64_t)(field[i] - '0');
    return i == size || field[i] == '\0' || field[i] == ' ' ? 0 : -1;
}

static uint64_t checksum(const unsigned char *header) {
    uint64_t sum = 0;
    for (int i = 0; i < TAR_BLOCK; i++) sum += i >= CHECKSUM && i < CHECKSUM + NUMBER_SIZE ? ' ' : header[i];
    return sum;
}

static int is_zero(const unsigned char *block) {
    for (int i = 0; i < TAR_BLOCK; i++)
        if (block[i] != 0) return 0;
    return 1;
}

/* What extended headers said of the next entry. */
struct said {
    int path, link, size, changed;
    uint64_t bytes;
};

/* The body of an extended header, in reader->extra with a NUL behind it. */
static int take_extra(struct tar_reader *reader, uint64_t size) {
    if (size > TAR_EXTRA) return wrong(reader, "an extended header is too long");
    if (take_all(reader, reader->extra, size) < 0 || take_all(reader, NULL, tar_padding(size)) < 0) return -1;
    reader->extra[size] = '\0';
    return 1;
}

static int keep_path(struct tar_reader *reader, char *into, const char *from, size_t size) {
    size_t length = strnlen(from, size);
    if (length >= TAR_PATH) return wrong(reader, "a path is too long");
    memcpy(into, from, length);
    into[length] = '\0';
    return 1;
}

static int decimal(const char *from, size_t size, uint64_t *value) {
    *value = 0;
    if (size == 0) return -1;
    for (size_t i = 0; i < size; i++) {
        if (from[i] < '0' || from[i] > '9' || *value >= MAX_SIZE) return -1;
        *value = *value * 10 + (uint64_t)(from[i] - '0');
    }
    return 0;
}

/* Seconds, fractions left out; a time before 1970 becomes 1970. */
static int pax_time(const char *value, size_t size, struct timespec *into) {
    uint64_t seconds = 0;
    const char *point = memchr(value, '.', size);
    if (size == 0) return -1;
    if (value[0] != '-' && decimal(value, point ? (size_t)(point - value) : size, &seconds) < 0) return -1;
    into->tv_sec = seconds > (uint64_t)MAX_SECONDS ? MAX_SECONDS : (time_t)seconds;
    into->tv_nsec = 0;
    return 0;
}

static int pax_value(struct tar_reader *reader, struct tar_member *member, struct said *said, const char *key, const char *value, size_t size) {
    if (strcmp(key, "path") == 0) return said->path = 1, keep_path(reader, member->path, value, size);
    if (strcmp(key, "linkpath") == 0) return said->link = 1, keep_path(reader, member->link, value, size);
    if (strcmp(key, "mtime") == 0)
        return said->changed = 1, pax_time(value, size, &member->changed) < 0 ? wrong(reader, "a pax time is no number") : 1;
    if (strcmp(key, "size") == 0)
        return said->size = 1, decimal(value, size, &said->bytes) < 0 ? wrong(reader, "a pax size is no number") : 1;
    if (strncmp(key, "GNU.sparse.", 11) == 0) return wrong(reader, "sparse entries are not understood");
    return 1;
}

/* Records of the form "LENGTH KEY=VALUE\n", where LENGTH counts all of the record. */
static int take_pax(struct tar_reader *reader, struct tar_member *member, struct said *said, size_t size) {
    static const char error[] = "a pax header is malformed";
    for (char *at = reader->extra, *end = at + size; at < end;) {
        char *space = memchr(at, ' ', (size_t)(end - at));
        uint64_t length;
        if (space == NULL || decimal(at, (size_t)(space - at), &length) < 0) return wrong(reader, error);
        if (length > (uint64_t)(end - at) || at + length < space + 3 || at[length - 1] != '\n') return wrong(reader, error);
        char *equals = memchr(space + 1, '=', (size_t)(at + length - 1 - (space + 1)));
        if (equals == NULL) return wrong(reader, error);
        *equals = '\0';
        if (pax_value(reader, member, said, space + 1, equals + 1, (size_t)(at + length - 1 - (equals + 1))) < 0) return -1;
        at += length;
    }
    return 1;
}

/* A header that speaks of the next entry: 1 taken, 0 it is none, -1. */
static int take_extension(struct tar_reader *reader, struct tar_member *member, struct said *said, char type, uint64_t size) {
    if (strchr("LKxXg", type) == NULL || type == '\0') return 0;
    if (take_extra(reader, size) < 0) return -1;
    if (type == 'L') return said->path = 1, keep_path(reader, member->path, reader->extra, (size_t)size);
    if (type == 'K') return said->link = 1, keep_path(reader, member->link, reader->extra, (size_t)size);
    if (type != 'g') return take_pax(reader, member, said, (size_t)size);
    struct said global = {0, 0, 0, 0, 0};
    if (take_pax(reader, member, &global, (size_t)size) < 0) return -1;
    if (global.path || global.link || global.size) return wrong(reader, "a global header names one file");
    return 1;
}

static void ustar_name(char *into, const unsigned char *header) {
    size_t length = 0;
    if (memcmp(header + MAGIC, "ustar", 6) == 0 && header[PREFIX] != '\0') {
        length = strnlen((const char *)header + PREFIX, PREFIX_SIZE);
        memcpy(into, header + PREFIX, length);
        into[length++] = '/';
    }
    size_t name = strnlen((const char *)header + NAME, NAME_SIZE);
    memcpy(into + length, header + NAME, name);
    into[length + name] = '\0';
}

static enum tar_kind kind_of(char type, const char *path) {
    size_t length = strlen(path);
    switch (type) {
        case '\0': case '0': case '7':
            return length > 0 && path[length - 1] == '/' ? TAR_DIRECTORY : TAR_FILE;
        case '1': return TAR_HARD_LINK;
        case '2': return TAR_LINK;
        case '5': return TAR_DIRECTORY;
        default: return TAR_OTHER;
    }
}

/* The entry itself, from its header and what was said before it. */
static int take_member(struct tar_reader *reader, struct tar_member *member, const struct said *said, const unsigned char *header, uint64_t size) {
    uint64_t mode, changed;
    char type = (char)header[TYPE];
    if (strchr("01234567", type) == NULL) return wrong(reader, "an entry of unknown kind"); /* strchr also finds the NUL of old archives */
    if (number(header + MODE, NUMBER_SIZE, &mode) < 0) return wrong(reader, "a mode is no number");
    if (!said->path) ustar_name(member->path, header);
    if (!said->link) keep_path(reader, member->link, (const char *)header + LINK, NAME_SIZE);
    if (!said->changed) {
        if (number(header + CHANGED, LONG_SIZE, &changed) < 0) changed = 0; /* before 1970 */
        member->changed.tv_sec = changed > (uint64_t)MAX_SECONDS ? MAX_SECONDS : (time_t)changed;
        member->changed.tv_nsec = 0;
    }
    member->mode = (unsigned)mode & 01777;
    member->kind = kind_of(type, member->path);
    member->size = member->kind == TAR_FILE ? said->size ? said->bytes : size : 0;
    reader->left = member->size;
    reader->padding = tar_padding(member->size);
    return 1;
}

int tar_next(struct tar_reader *reader, struct tar_member *member) {
    unsigned char header[TAR_BLOCK];
    struct said said = {0, 0, 0, 0, 0};
    if (take_all(reader, NULL, reader->left) < 0 || take_all(reader, NULL, reader->padding) < 0) return -1;
    reader->left = reader->padding = 0;
    for (int extensions = 0; extensions < 16; extensions++) {
        uint64_t size, sum;
        int taken = take(reader, header, TAR_BLOCK);
        if (taken < 0) return -1;
        if (taken == 0) return reader->started ? wrong(reader, "cut short") : 0;
        reader->started = 1;
        if (is_zero(header)) return said.path || said.link || said.size ? wrong(reader, "cut short") : 0;
        if (number(header + CHECKSUM, NUMBER_SIZE, &sum) < 0 || sum != checksum(header)) return wrong(reader, "not a tar archive");
        if (number(header + SIZE, LONG_SIZE, &size) < 0 || size > MAX_SIZE) return wrong(reader, "a size is no number");
        taken = take_extension(reader, member, &said, (char)header[TYPE], size);
        if (taken < 0) return -1;
        if (taken == 0) return take_member(reader, member, &said, header, size);
    }
    return wrong(reader, "too many extended headers");
}

/* ---- headers out ---- */

/* Octal with a NUL behind it, or base 256 where it is too large. */
static void put_number(unsigned char *field, int size, uint64_t value) {
    if (value >> (3 * (size - 1)) == 0) {
        for (int i = size - 2; i >= 0; i--, value >>= 3) field[i] = (unsigned char)('0' + (value & 7));
        return;
    }
    for (int i = size - 1; i > 0; i--, value >>= 8) field[i] = (unsigned char)value;
    field[0] = 0x80;
}

static void start_header(unsigned char *header, char type, const char *path, uint64_t size) {
    memset(header, 0, TAR_BLOCK);
    memcpy(header + NAME, path, strnlen(path, NAME_SIZE));
    memcpy(header + MAGIC, "ustar  ", 8);
    header[TYPE] = (unsigned char)type;
    put_number(header + SIZE, LONG_SIZE, size);
}

static int finish_header(unsigned char *header, int (*write_all)(const void *, size_t)) {
    put_number(header + CHECKSUM, NUMBER_SIZE - 1, checksum(header));
    header[CHECKSUM + NUMBER_SIZE - 1] = ' ';
    return write_all(header, TAR_BLOCK);
}

/* An entry of type `type` that holds a name too long for the next one's header. */
static int long_name(char type, const char *name, int (*write_all)(const void *, size_t)) {
    static const unsigned char zeros[TAR_BLOCK];
    unsigned char header[TAR_BLOCK];
    size_t size = strlen(name) + 1;
    start_header(header, type, LONG_NAME, size);
    put_number(header + MODE, NUMBER_SIZE, 0644);
    put_number(header + UID, NUMBER_SIZE, 0);
    put_number(header + GID, NUMBER_SIZE, 0);
    put_number(header + CHANGED, LONG_SIZE, 0);
    if (finish_header(header, write_all) < 0 || write_all(name, size) < 0) return -1;
    return write_all(zeros, tar_padding(size));
}

int tar_header(const struct tar_member *member, unsigned uid, unsigned gid, int (*write_all)(const void *, size_t)) {
    unsigned char header[TAR_BLOCK];
    if (strlen(member->link) > NAME_SIZE && long_name('K', member->link, write_all) < 0) return -1;
    if (strlen(member->path) > NAME_SIZE && long_name('L', member->path, write_all) < 0) return -1;
    start_header(header, (char)member->kind, member->path, member->size);
    put_number(header + MODE, NUMBER_SIZE, member->mode & 07777);
    put_number(header + UID, NUMBER_SIZE, uid);
    put_number(header + GID, NUMBER_SIZE, gid);
    put_number(header + CHANGED, LONG_SIZE, member->changed.tv_sec < 0 ? 0 : (uint64_t)member->changed.tv_sec);
    memcpy(header + LINK, member->link, strnlen(member->link, NAME_SIZE));
    return finish_header(header, write_all);
}
