/* The agent's own seccomp filter, for itself and all that it starts. */
#ifndef ROLLWAY_FILTER_H
#define ROLLWAY_FILTER_H

/* 0, or -1 with errno. Needs no_new_privs. */
int filter_install(void);

#endif
