/* The processes that descend from one, seen through /proc. */
#ifndef ROLLWAY_TREE_H
#define ROLLWAY_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* Kills every descendant of `root` but those for which `spared` says true, and theirs. All are stopped first,
 * round by round, until no new one shows up: then nothing is left that could fork. What still does so after some rounds is a fork bomb;
 * as process 1 the agent then kills everything at once.
 * Never blocks for long. Returns how many it found alive; 0 when there is nothing to kill any more. */
size_t tree_kill(pid_t root, bool (*spared)(pid_t pid));

/* How many descendants of `root` are alive but for those that `left_out` names; the descendants of these count. */
size_t tree_count(pid_t root, bool (*left_out)(pid_t pid));

#endif
