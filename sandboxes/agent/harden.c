#define _GNU_SOURCE
#include "harden.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <net/if.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "filter.h"

enum { LAST_CAPABILITY = 63, EXIT_HARDEN = 71 };

/* The agent's own, so that calls may have users, kills reach every process, and files can be put anywhere. */
#define KEPT (1ull << CAP_SETUID | 1ull << CAP_SETGID | 1ull << CAP_KILL | 1ull << CAP_CHOWN | 1ull << CAP_DAC_OVERRIDE | 1ull << CAP_FOWNER)

static _Noreturn void fail(const char *step) {
    fprintf(stderr, "rollway agent: %s: %s; not serving\n", step, strerror(errno));
    exit(EXIT_HARDEN);
}

static void raise_loopback(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request) != 0)
        fail("bring lo up");
    close(fd);
}

/* The pause container's own, mounted into every sandbox that starts in its namespace and writable, and the volume that this program came
 * from: read-only, but a lock on one of its files, or a watch, is seen by every sandbox. Channels between them. */
static void leave_shared_files(void) {
    static const char *const shared[] = {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/.rollway"};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++)
        if (umount2(shared[i], MNT_DETACH | UMOUNT_NOFOLLOW) != 0 && errno != EINVAL && errno != ENOENT)
            fail(shared[i]);
}

/* Where the root is read-only there is none; programs then take `localhost` from themselves or not at all. */
static void write_hosts(void) {
    static const char text[] = "127.0.0.1\tlocalhost\n::1\tlocalhost\n";
    int fd = open("/etc/hosts", O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd < 0)
        return;
    (void)!write(fd, text, sizeof text - 1);
    close(fd);
}

void harden_network(void) {
    if (unshare(CLONE_NEWNET) != 0)
        fail("unshare the network (CAP_SYS_ADMIN)");
    raise_loopback();
    leave_shared_files();
    write_hosts();
}

static int set_capabilities(uint64_t kept) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {
        {.effective = (uint32_t)kept, .permitted = (uint32_t)kept},
        {.effective = (uint32_t)(kept >> 32), .permitted = (uint32_t)(kept >> 32)},
    };
    return (int)syscall(SYS_capset, &header, data);
}

static uint64_t get_capabilities(void) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {{0}};
    if (syscall(SYS_capget, &header, data) != 0)
        return 0;
    return data[0].permitted | (uint64_t)data[1].permitted << 32;
}

static bool root_keeps;

static void drop_bounding_set(int strict) {
    for (unsigned long capability = 0; capability <= LAST_CAPABILITY; capability++)
        if (!(root_keeps && KEPT >> capability & 1) && prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0 && errno != EINVAL && strict)
            fail("drop the bounding set (CAP_SETPCAP)");
}

uint32_t harden_self(int strict, bool leave_root) {
    root_keeps = leave_root;
    drop_bounding_set(strict);
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    if (set_capabilities(get_capabilities() & KEPT) != 0)
        fail("drop capabilities");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        fail("forbid new privileges");
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0)
        fail("close /proc/self");
    if (filter_install() == 0)
        return FEATURE_SECCOMP;
    if (strict)
        fail("install the seccomp filter");
    return 0;
}

int harden_child(void) { return root_keeps && geteuid() == 0 ? 0 : set_capabilities(0); }
