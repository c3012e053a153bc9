/* What the agent gives up before it runs anything, and what its children give up before they run something. */
#ifndef ROLLWAY_HARDEN_H
#define ROLLWAY_HARDEN_H

#include <stdbool.h>
#include <stdint.h>

enum { FEATURE_OWN_NETWORK = 1, FEATURE_SECCOMP = 2, FEATURE_DISK_WATCH = 4, FEATURE_FIRST_PROCESS = 8 };

/* Leaves the network namespace that others share for one with nothing but `lo`, and the files that came with it. Ends the agent with a
 * message where anything of it fails. */
void harden_network(void);

/* Drops the capabilities that the agent does not need and its bounding set, forbids new privileges, closes /proc/self to others,
 * installs the seccomp filter. With `leave_root`, what root runs holds the capabilities that the agent keeps. With `strict`, any step that fails ends the agent; without, only what no start may lack.
 * Returns features. */
uint32_t harden_self(int strict, bool leave_root);

/* In a child before exec: no capability in any set, but for root where it was left them. Plain system calls only. 0, or -1 with errno. */
int harden_child(void);

#endif
