#define _GNU_SOURCE
#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { APART_BYTES = 64 * 1024 };

static size_t held;

static void *map(size_t size) {
    void *block = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return block == MAP_FAILED ? NULL : block;
}

static void release(void *block, size_t size) {
    if (size >= APART_BYTES)
        munmap(block, size);
    else
        free(block);
}

void *memory_resize(void *block, size_t size, size_t new_size) {
    void *made = NULL;
    if (new_size > 0) {
        if (size >= APART_BYTES && new_size >= APART_BYTES) {
            made = mremap(block, size, new_size, MREMAP_MAYMOVE);
            if (made == MAP_FAILED)
                return NULL;
            held += new_size - size;
            return made;
        }
        made = new_size >= APART_BYTES ? map(new_size) : malloc(new_size);
        if (made == NULL)
            return NULL;
        if (size > 0)
            memcpy(made, block, size < new_size ? size : new_size);
    }
    if (size > 0)
        release(block, size);
    held += new_size - size;
    return made;
}

void memory_keep_from_children(void *block, size_t size) {
    if (size >= APART_BYTES)
        madvise(block, size, MADV_DONTFORK);
}

size_t memory_held(void) { return held; }

void *memory_fixed(size_t size, bool forked) {
    void *block = map(size);
    if (block == NULL) {
        perror("rollway agent: no memory");
        exit(70);
    }
    if (!forked)
        memory_keep_from_children(block, size);
    return block;
}
