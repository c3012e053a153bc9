/* Tar archives, read and written: pure but for one read or write at a time. The reader takes what an attacher sends, which may come from
 * another sandbox: every length is checked before it is used. */
#ifndef ROLLWAY_TAR_H
#define ROLLWAY_TAR_H

#include <stdint.h>
#include <stdio.h>
#include <time.h>

enum {
    TAR_BLOCK = 512,
    TAR_PATH = 65536,   /* bytes of a path with its NUL; longer ones are refused */
    TAR_EXTRA = 262144, /* bytes of one extended header */
    TAR_BUFFER = 65536,
};

enum tar_kind { TAR_FILE = '0', TAR_HARD_LINK = '1', TAR_LINK = '2', TAR_DIRECTORY = '5', TAR_OTHER = '?' };

/* One entry. `size` counts bytes that follow it, for files alone. */
struct tar_member {
    enum tar_kind kind;
    unsigned mode; /* permission bits and the sticky bit */
    uint64_t size;
    struct timespec changed;
    char path[TAR_PATH];
    char link[TAR_PATH];
};

struct tar_reader {
    int fd;
    int started;       /* whether anything came */
    const char *error; /* what is wrong, after a -1 */
    uint64_t left;     /* bytes of the member's content, not read yet */
    unsigned padding;  /* after it */
    size_t next, end;  /* in buffer */
    unsigned char buffer[TAR_BUFFER];
    char extra[TAR_EXTRA + 1];
};

/* Reads from `fd`. Large, so static. */
void tar_open(struct tar_reader *reader, int fd);

/* The next entry, what was left of the one before skipped: 1, 0 at the archive's end (a
 * stream without a byte is an empty archive), -1 when it is no archive, cut short or past a bound.
 * GNU and ustar entries, GNU long names and pax headers are understood; devices, pipes and the like come as TAR_OTHER. */
int tar_next(struct tar_reader *reader, struct tar_member *member);

/* Bytes of the member's content: how many, 0 at its end, -1 when the archive is cut short. `*from` is good until the next call. */
long tar_content(struct tar_reader *reader, const unsigned char **from);

/* Reads to the end of the stream, so that its writer does not find it closed. */
void tar_drain(struct tar_reader *reader);

/* Writes what comes before a member's content: the header, and long names before it. `write_all(bytes, n)` returns 0, or -1 to stop. */
int tar_header(const struct tar_member *member, unsigned uid, unsigned gid, int (*write_all)(const void *, size_t));

/* How many zero bytes follow content of `size` bytes. */
unsigned tar_padding(uint64_t size);

#endif
