/* The payloads of RUN and CONFIGURE, taken apart. Every length is checked; strings stay where they are. */
#ifndef ROLLWAY_REQUEST_H
#define ROLLWAY_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RUN_MAX_BYTES = 4 * 1024 * 1024, CAP_MAX_BYTES = 32 * 1024 * 1024, ARGUMENTS_MAX = 262144, ENV_MAX = 4096 };

/* An array of strings that ends with NULL, with one more place behind it. */
struct strings {
    char **items;
    uint32_t count;
};

struct run_request {
    uint8_t kind;
    uint32_t timeout_ms, cap;
    uint64_t flood;
    char *user, *workdir, *session;
    struct strings argv, env;
};

struct configure_request {
    uint32_t disk_mib, inodes;
    char *user, *workdir;
    struct strings env;
};

/* Both return 0, or the code of an ERROR, with nothing to be freed then. The strings point into `bytes`. */
int run_decode(struct run_request *request, uint8_t *bytes, size_t length);
void run_free(struct run_request *request);
int configure_decode(struct configure_request *request, uint8_t *bytes, size_t length);
void configure_free(struct configure_request *request);

#endif
