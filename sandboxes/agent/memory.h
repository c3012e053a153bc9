/* Memory that grows and is counted. What is big is mapped apart, so that it goes back to the kernel when it is freed. */
#ifndef ROLLWAY_MEMORY_H
#define ROLLWAY_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

/* Changes a block's size; `block` may be NULL with size 0, a new size of 0 frees. NULL when there is no memory: the block stays. */
void *memory_resize(void *block, size_t size, size_t new_size);

/* Keeps a block out of forks, where it is big: a call costs a fork of the agent, which has to stay cheap however much output is kept. No
 * child may read it then. */
void memory_keep_from_children(void *block, size_t size);

/* As many bytes as blocks hold now. */
size_t memory_held(void);

/* A zeroed buffer for as long as the agent lives, not counted; out of forks like above unless `forked`. Ends the agent when there is no memory. */
void *memory_fixed(size_t size, bool forked);

#endif
