/* The disk watch: how much a sandbox wrote to its root file system, where the engine has no quotas.
 *
 * Counted are the blocks and inodes of what lies on the device of `/` and was changed (ctime) since the first watch_configure: the files
 * of the image are older. That tells the sandbox's own files apart without any privilege, on overlayfs and elsewhere; a file of the
 * image that is written to, or whose mode changes, counts whole, for it was copied. Unlinked files that a process holds open count too,
 * as far as /proc shows them: not those of a process that made itself undumpable, nor those that are only mapped.
 *
 * It trips when more than the limits is used and more than at the walk before, so that what frees space may run; past twice the limits,
 * or with directories deeper than WATCH_DEPTH, it trips at every walk.
 *
 * One thread, made by watch_configure and never by a later call (a fork bomb leaves no room for one then). It never allocates, and
 * sleeps for good while nothing is active. It walks when the sandbox's processes wrote what could be an eighth of what is left to the
 * limits: a second after the last walk, later where a walk is dear, sooner where the disk fills fast. */
#ifndef ROLLWAY_WATCH_H
#define ROLLWAY_WATCH_H

#include <stdint.h>

enum {
    WATCH_DEPTH = 256,
    WATCH_INODE_BYTES = 256, /* the least that making a file writes */
};

/* Sets the limits: `disk_mib` MiB (0 = no watch) and `inodes` (0 = that number is not limited). The first call with a limit makes the
 * thread; later ones change the limits. Returns an eventfd (non-blocking) that turns readable each time the watch trips, the same one
 * at each call; -1 with errno when it or the thread could not be made; -2 when there is nothing to watch (disk_mib 0, no thread yet). */
int watch_configure(uint32_t disk_mib, uint32_t inodes);

/* Whether anything runs that could write: a call or a leftover. Cheap, never blocks; call it whenever that changes, or at each turn of
 * the poll loop. */
void watch_active(int active);

/* So many bytes were written where the watch cannot see it: by a fork of the agent, whose /proc is closed. The fork itself may say so;
 * after the writing, so that a walk that missed it is followed by another. */
void watch_wrote(uint64_t bytes);

/* Reads and clears the eventfd: 1 when it tripped since the last time. Call it when the eventfd is readable: then every call is to be
 * killed with the flag "disk full". */
int watch_tripped(void);

/* What the last walk found, for PONG; 0 before the first one. */
void watch_used(uint64_t *bytes, uint64_t *inodes);

#endif
