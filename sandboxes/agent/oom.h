/* How many processes of the sandbox's control group the kernel killed for memory. */
#ifndef ROLLWAY_OOM_H
#define ROLLWAY_OOM_H

#include <stdint.h>

/* Finds the counter: `fd` where one was inherited, else (-1) in /sys/fs/cgroup. Where there is none the count stays 0. */
void oom_open(int fd);
uint64_t oom_kills(void);

#endif
