"""A decoder that was taken over by its input: it tries to get out by every system call that could help."""

from __future__ import annotations

import errno
import json
import platform
import subprocess
import sys
from collections import Counter
from typing import Any

from serving import Server

CALLS: dict[str, tuple[int, int | None, str]] = {
    # call: (number on x86-64, number on arm64, arguments)
    "rt_sigqueueinfo": (129, 138, "victim, 9, info"),
    "rt_tgsigqueueinfo": (297, 240, "victim, victim, 9, info"), "kill": (62, 129, "victim, 9"),
    "tkill": (200, 130, "victim, 9"), "tgkill": (234, 131, "victim, victim, 9"),
    "kill itself": (62, 129, "own, 0"), "pidfd_open": (434, 434, "victim, 0"),
    "pidfd_send_signal": (424, 424, "1, 9, 0, 0"), "pidfd_getfd": (438, 438, "1, 1, 0"),
    "ptrace": (101, 117, "16, victim, 0, 0"), "process_vm_readv": (310, 270, "victim, 0, 0, 0, 0, 0"),
    "process_vm_writev": (311, 271, "victim, 0, 0, 0, 0, 0"), "kcmp": (312, 272, "victim, own, 0, 0, 0"),
    "process_madvise": (440, 440, "1, 0, 0, 4, 0"), "process_mrelease": (448, 448, "1, 0"),
    "sched_setaffinity": (203, 122, "victim, 8, words"),
    "sched_setscheduler": (144, 119, "victim, 5, words"), "sched_setattr": (314, 274, "victim, words, 0"),
    "setpriority": (141, 140, "0, victim, 19"), "ioprio_set": (251, 30, "1, victim, 24576"),
    "prlimit64": (302, 261, "victim, 7, words, 0"), "migrate_pages": (256, 238, "victim, 8, words, words"),
    "move_pages": (279, 239, "victim, 0, 0, 0, 0, 0"), "setpgid": (109, 154, "victim, 0"),
    "open": (2, None, "path, 66, 384"), "openat": (257, 56, "-100, path, 66, 384"),
    "openat2": (437, 437, "-100, path, words, 24"), "creat": (85, None, "path, 384"),
    "stat": (4, None, "path, words"), "newfstatat": (262, 79, "-100, path, words, 0"),
    "access": (21, None, "path, 0"), "readlinkat": (267, 78, "-100, path, words, 64"),
    "getdents64": (217, 61, "0, words, 64"), "fchmodat2": (452, 452, "-100, path, 511, 0"),
    "fchmodat": (268, 53, "-100, path, 511"), "chmod": (90, None, "path, 511"),
    "fchmod": (91, 52, "0, 511"), "chown": (92, None, "path, 0, 0"),
    "setxattrat": (463, 463, "-100, path, 0, path, words, 16"), "utimensat": (280, 88, "-100, path, 0, 0"),
    "unlinkat": (263, 35, "-100, path, 0"), "renameat2": (316, 276, "-100, path, -100, path, 0"),
    "inotify_init1": (294, 26, "0"), "name_to_handle_at": (303, 264, "-100, path, words, words, 0"),
    "open_by_handle_at": (304, 265, "0, words, 0"), "chdir": (80, 49, "path"), "chroot": (161, 51, "path"),
    "socket": (41, 198, "2, 1, 0"), "socketpair": (53, 199, "1, 1, 0, words"),
    "connect": (42, 203, "0, words, 16"), "bind": (49, 200, "0, words, 16"),
    "accept4": (288, 242, "0, 0, 0, 0"), "sendmsg": (46, 211, "0, words, 0"),
    "setsockopt": (54, 208, "0, 1, 1, words, 4"), "dup2": (33, None, "0, 1"), "dup3": (292, 24, "0, 1, 0"),
    "fcntl F_SETOWN": (72, 25, "0, 8, victim"), "fcntl F_SETFL O_ASYNC": (72, 25, "0, 4, 8192"),
    "fcntl F_SETSIG": (72, 25, "0, 10, 9"), "ioctl TIOCSTI": (16, 29, "0, 0x5412, words"),
    "ioctl FIOSETOWN": (16, 29, "0, 0x8901, words"), "bpf": (321, 280, "0, words, 48"),
    "io_uring_setup": (425, 425, "8, words"), "io_uring_enter": (426, 426, "0, 0, 0, 0, 0, 0"),
    "io_uring_register": (427, 427, "0, 0, 0, 0"), "io_setup": (206, 0, "8, words"),
    "userfaultfd": (323, 282, "1"), "add_key": (248, 217, "path, path, words, 8, 0"),
    "keyctl": (250, 219, "0, 0, 0"), "request_key": (249, 218, "path, path, 0, 0"),
    "mount": (165, 40, "path, path, path, 0, 0"), "open_tree": (428, 428, "-100, path, 1"),
    "fsopen": (430, 430, "path, 0"), "pivot_root": (155, 41, "path, path"),
    "unshare": (272, 97, "0x10000000"), "setns": (308, 268, "0, 0"), "memfd_create": (319, 279, "path, 0"),
    "execve": (59, 221, "path, 0, 0"), "execveat": (322, 281, "0, path, 0, 0, 4096"),
    "fork": (57, None, ""), "vfork": (58, None, ""), "clone SIGCHLD": (56, 220, "17, 0, 0, 0, 0"),
    "clone CLONE_VM": (56, 220, "0x100 | 17, 0, 0, 0, 0"), "clone3": (435, 435, "words, 88"),
    "clone CLONE_NEWUSER": (56, 220, "0x10000000 | 17, 0, 0, 0, 0"),
    "a thread in another network": (56, 220, "0x50F00 | 0x40000000, 0, 0, 0, 0"),
    "personality": (135, 92, "0x0400000"), "perf_event_open": (298, 241, "words, 0, -1, -1, 0"),
    "shmget": (29, 194, "1, 4096, 950"), "shmat": (30, 196, "0, 0, 0"), "msgget": (68, 186, "1, 950"),
    "semget": (64, 190, "1, 1, 950"), "mq_open": (240, 180, "path, 66, 384, 0"),
    "timer_create": (222, 107, "0, words, words"), "timerfd_create": (283, 85, "0, 0"),
    "signalfd4": (289, 74, "-1, words, 8, 0"), "eventfd2": (290, 19, "0, 0"),
    "setitimer ITIMER_PROF": (38, 103, "2, words, 0"), "alarm": (37, None, "0"),
    "landlock_create_ruleset": (444, 444, "0, 0, 1"), "seccomp": (317, 277, "1, 0, words"),
    "prctl PR_SET_PTRACER": (157, 167, "0x59616d61, -1, 0, 0, 0"),
    "prctl PR_SET_MM": (157, 167, "35, 1, 0, 0, 0"), "prctl PR_SET_PDEATHSIG": (157, 167, "1, 9, 0, 0, 0"),
    "arch_prctl": (158, None, "0x1001, words"), "modify_ldt": (154, None, "0, words, 16"),
    "mmap PROT_EXEC": (9, 222, "0, 4096, 7, 34, -1, 0"), "mprotect PROT_EXEC": (10, 226, "page, 4096, 5"),
    "pkey_mprotect": (329, 288, "page, 4096, 5, -1"), "remap_file_pages": (216, 234, "page, 4096, 0, 0, 0"),
    "map_shadow_stack": (453, 453, "0, 4096, 0"), "memfd_secret": (447, 447, "0"),
    "futex FUTEX_LOCK_PI": (202, 98, "words, 6, 0, 0, 0, 0"),
    "futex FUTEX_CMP_REQUEUE_PI": (202, 98, "words, 12, 0, 0, words, 0"),
    "futex_waitv": (449, 449, "0, 0, 0, 0, 0"), "setuid": (105, 146, "0"),
    "setresuid": (117, 147, "0, 0, 0"), "setgroups": (116, 159, "0, 0"),
    "capset": (126, 91, "words, words"), "setrlimit": (160, 164, "7, words"),
    "sethostname": (170, 161, "path, -1"), "syslog": (103, 116, "3, words, 64"),
    "finit_module": (313, 273, "0, path, 0"), "reboot": (169, 142, "0, 0, 0, 0"),
    "kexec_load": (246, 104, "0, 0, 0, 0"), "clock_settime": (227, 112, "0, 0"),
    "adjtimex": (159, 171, "0"), "ftruncate": (77, 46, "0, 0"), "fallocate": (285, 47, "0, 0, 0, 8"),
    "splice": (275, 76, "0, 0, 0, 0, 8, 0"), "vmsplice": (278, 75, "0, 0, 0, 0"),
    "copy_file_range": (326, 285, "0, 0, 0, 0, 8, 0"),
}  # fmt: skip
"""Calls that a taken-over decoder is not allowed. `victim` is the number of the server's process."""

_SCRIPT = """
import ctypes, json, os, sys, threading
from fovea.media.sandbox import jail

def call(number, *values):
    ctypes.set_errno(0)
    values = [value if hasattr(value, "_type_") else ctypes.c_long(value) for value in values]
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *values) == -1 else 0

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, ctypes.c_long(4096), 3, 34, -1, ctypes.c_long(0))
path, words, info = ctypes.c_char_p(b"/missing"), (ctypes.c_long * 64)(), (ctypes.c_int * 32)(9, 0, -1)
victim, own = int(sys.argv[2]), os.getpid()
# Without these two, the filter alone stands between the attacker, who may be root, and the victim.
jail._change_user, jail._drop_capabilities = lambda number: False, lambda: None
measures = jail.enter(256 << 20)
seen = {}
for name, (number, arguments) in json.loads(sys.argv[1]).items():
    seen[name] = call(number, *eval(f"[{arguments}]"))
threads = []
thread = threading.Thread(target=threads.append, args=("started",))
thread.start()
thread.join()
os.write(1, json.dumps([measures, seen, threads]).encode())
os.abort()
"""


def try_calls(victim: int) -> tuple[list[str], dict[str, int], list[str], int]:
    """Let a decoder attack a process of the same user by all calls of this machine.

    Returns the measures of its jail, the error of each call (0: it was not refused), the threads that it
    could start, and how it ended after abort().
    """
    column = ("x86_64", "aarch64").index(platform.machine())
    calls = {name: (call[column], call[2]) for name, call in CALLS.items() if call[column] is not None}
    command = [sys.executable, "-c", _SCRIPT, json.dumps(calls), str(victim)]
    done = subprocess.run(command, capture_output=True, timeout=60)
    measures, seen, threads = json.loads(done.stdout)
    return measures, seen, threads, done.returncode


def accepted(seen: dict[str, Any]) -> list[str]:
    """The calls that were not refused."""
    return [name for name, error in seen.items() if error not in (errno.EPERM, errno.ENOSYS)]


def check() -> tuple[Counter[str], list[str]]:
    """Attack a running server from a decoder. Returns what the calls answered, and the problems."""
    server = Server()
    try:
        server.wait_ready()
        _, seen, _, _ = try_calls(server.pid)
        problems = [f"{name} was not refused" for name in accepted(seen)]
        if not server.alive():
            problems.append("the server died")
        return Counter(errno.errorcode.get(error, "allowed") for error in seen.values()), problems
    finally:
        server.stop()
