#define _GNU_SOURCE
#include "filter.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
#define OUR_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define OUR_ARCH AUDIT_ARCH_AARCH64
#else
#error "the filter knows x86_64 and aarch64"
#endif

/* The same numbers on every architecture since they were introduced after the tables were unified. */
enum { NR_OPEN_TREE = 428, NR_MOVE_MOUNT, NR_FSOPEN, NR_FSCONFIG, NR_FSMOUNT, NR_FSPICK, NR_CLONE3 = 435, NR_MOUNT_SETATTR = 442 };
enum { NR_IO_URING_SETUP = 425, NR_IO_URING_REGISTER = 427, NR_QUOTACTL_FD = 443, NR_LISTMOUNT = 458 };

/* What a container's profile opens with CAP_SYS_ADMIN, which the start needed, and what has been a way out of namespaces before. No call
 * holds a capability; this closes what would not ask for one, or would inside a namespace of the caller's own. */
static const uint32_t refused[] = {
    SYS_mount, SYS_umount2, SYS_pivot_root, SYS_unshare, SYS_setns, NR_OPEN_TREE, NR_MOVE_MOUNT, NR_FSOPEN, NR_FSCONFIG, NR_FSMOUNT,
    NR_FSPICK, NR_MOUNT_SETATTR, SYS_bpf, SYS_perf_event_open, SYS_fanotify_init, SYS_add_key, SYS_request_key, SYS_keyctl,
    SYS_sethostname, SYS_setdomainname, SYS_quotactl, NR_QUOTACTL_FD, SYS_open_by_handle_at, SYS_name_to_handle_at, SYS_syslog, SYS_swapon,
    SYS_swapoff, SYS_reboot, SYS_init_module, SYS_finit_module, SYS_delete_module, SYS_kexec_load, SYS_acct, SYS_settimeofday,
    SYS_clock_settime, SYS_userfaultfd, SYS_vhangup, NR_IO_URING_SETUP, NR_IO_URING_REGISTER,
};

/* Sockets of other families know no network namespace (AF_VSOCK reaches the machine's host, and neighbours), or open much of the kernel. */
static const uint32_t families[] = {AF_UNIX, AF_INET, AF_INET6, AF_NETLINK};

enum { REFUSED = sizeof refused / sizeof *refused, FAMILIES = sizeof families / sizeof *families, X32_BIT = 0x40000000, AGENT_PID = 1 };

#define NEW_NAMESPACE (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)
#define ANSWER(number) (SECCOMP_RET_ERRNO | ((number) & SECCOMP_RET_DATA))
#define LOAD(field) (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define JUMP(test, value, yes, no) (struct sock_filter) BPF_JUMP(BPF_JMP | (test) | BPF_K, (value), (yes), (no))
#define RETURN(value) (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, (value))

int filter_install(void) {
    struct sock_filter code[REFUSED + FAMILIES + 24];
    unsigned short n = 0;
    code[n++] = LOAD(arch);
    code[n++] = JUMP(BPF_JEQ, OUR_ARCH, 1, 0);
    code[n++] = RETURN(ANSWER(ENOSYS)); /* a 32-bit call, with numbers of its own */
    code[n++] = LOAD(nr);
    code[n++] = JUMP(BPF_JGE, X32_BIT, 0, 1);
    code[n++] = RETURN(ANSWER(ENOSYS));
    code[n++] = JUMP(BPF_JEQ, NR_CLONE3, 0, 1); /* its flags lie in memory, out of sight: the C library takes clone then */
    code[n++] = RETURN(ANSWER(ENOSYS));
    code[n++] = JUMP(BPF_JEQ, SYS_clone, 0, 3);
    code[n++] = LOAD(args[0]);
    code[n++] = JUMP(BPF_JSET, NEW_NAMESPACE, REFUSED + FAMILIES + 10, 0);
    code[n++] = RETURN(SECCOMP_RET_ALLOW);
    code[n++] = JUMP(BPF_JEQ, SYS_prlimit64, 0, 3); /* who is root could take the agent its files, or its life, with the same user's right */
    code[n++] = LOAD(args[0]);
    code[n++] = JUMP(BPF_JEQ, AGENT_PID, REFUSED + FAMILIES + 6, 0);
    code[n++] = RETURN(SECCOMP_RET_ALLOW);
    code[n++] = JUMP(BPF_JEQ, SYS_socket, 0, FAMILIES + 3);
    code[n++] = LOAD(args[0]);
    for (unsigned short i = 0; i < FAMILIES; i++)
        code[n++] = JUMP(BPF_JEQ, families[i], FAMILIES - i, 0);
    code[n++] = RETURN(ANSWER(EAFNOSUPPORT));
    code[n++] = RETURN(SECCOMP_RET_ALLOW);
    for (unsigned short i = 0; i < REFUSED; i++)
        code[n++] = JUMP(BPF_JEQ, refused[i], REFUSED - i, 0);
    code[n++] = RETURN(SECCOMP_RET_ALLOW);
    code[n++] = RETURN(ANSWER(EPERM));
    struct sock_fprog program = {.len = n, .filter = code};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}
