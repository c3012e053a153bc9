/* The spare supervisor: one whose last call left nothing behind waits for the next, which then costs no fork of the agent. What is sent
 * to it is what a fork would have inherited: the strings of the call in one message, with its pipes. */
#ifndef ROLLWAY_SPARE_H
#define ROLLWAY_SPARE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "spawn.h"

/* Hands `spawn` to the spare; its pid, and what spawn_start gives. 0 where there is none, or what is asked for needs a new one. */
pid_t spare_send(const struct spawn *spawn, int *status);
/* In the supervisor: waits for what is handed over, its pipes at 0, 1 and 2. False when the agent lets go. */
bool spare_receive(int socket, struct spawn *spawn);

/* Keeps the supervisor for the next call, or lets it go: one is enough. Owns `socket`. */
void spare_keep(pid_t pid, int socket);
/* Lets go of the spare. */
void spare_drop(void);
/* It was reaped: somebody killed it. */
void spare_reaped(pid_t pid);
bool spare_is(pid_t pid);

/* Lets go of what was not needed for long; when that is due, or 0. */
void spare_tick(int64_t now);
int64_t spare_deadline(void);

#endif
