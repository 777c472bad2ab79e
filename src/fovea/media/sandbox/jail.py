"""Takes rights from a decoding process before it sees its first file.

Each measure is taken where the system has it; `enter` returns the names of those that were taken. Together
they leave a decoder that was taken over by its input with its own memory, its socket to the server, and
nothing else: no files, no network, no other process.

System calls are refused unless they are in `_ALLOWED`, which has what CPython, glibc, Pillow, FFmpeg and
PDFium need to decode files that are in memory already. So a call that a later kernel adds is refused, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
from typing import NamedTuple

_NOBODY = 65534
_FIRST_OWN_USER = 0x7000_0000
"""Start of a range of user ids that no distribution and no service manager assigns."""
_MAX_THREADS = 512
_CAPABILITIES_V3 = 0x20080522
_KILL_AND_CHANGE_USER = 0b1110_0000
"""CAP_KILL, CAP_SETGID and CAP_SETUID. A decoding process starts with the capabilities of its server."""
_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE, _MISSING = 0x00050001, 0x00050026  # the call returns EPERM or ENOSYS
_LOAD, _AND, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT, _ARGUMENT_BYTES = 0, 4, 16, 8


class _ArgumentRule(NamedTuple):
    """Condition on an argument of a call. It is an int in the kernel, so its lower 32 bits decide.

    argument: its number from 0.
    values: what the argument may be.
    mask: the bits that are compared; all others may be anything.
    """

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


_OWN_PROCESS = _ArgumentRule(0, ())
"""Stands for a condition whose value is known only when the filter is made: the process itself."""
_NOT_EXECUTABLE = _ArgumentRule(2, (0,), mask=4)  # PROT_EXEC
# A thread shares everything with its process and gets no new namespace. Where glibc and musl store its number
# is up to them.
_THREAD = _ArgumentRule(
    0, (0x50F00,), mask=0xFFFFFFFF & ~(0x80000 | 0x100000 | 0x200000 | 0x400000 | 0x1000000)
)
# FUTEX_WAIT, WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, WAIT_BITSET, WAKE_BITSET; private or not, any clock. Locks
# with priority inheritance are left out: nothing here needs them, and they have a history of kernel defects.
_PLAIN_FUTEX = _ArgumentRule(1, (0, 1, 3, 4, 5, 9, 10), mask=0xFFFFFFFF & ~(128 | 256))

_ALLOWED: dict[str, tuple[int, int, _ArgumentRule | None]] = {
    # name: (number on x86-64, number on arm64, condition)
    # Memory
    "mmap": (9, 222, _NOT_EXECUTABLE), "mprotect": (10, 226, _NOT_EXECUTABLE), "munmap": (11, 215, None),
    "mremap": (25, 216, None), "brk": (12, 214, None), "madvise": (28, 233, None),
    # Threads
    "clone": (56, 220, _THREAD), "futex": (202, 98, _PLAIN_FUTEX), "set_robust_list": (273, 99, None),
    "rseq": (334, 293, None),  # glibc aborts if a thread cannot have what the first one had
    "sched_yield": (24, 124, None), "sched_getaffinity": (204, 123, None),
    "prctl": (157, 167, _ArgumentRule(0, (15,))),  # PR_SET_NAME
    "exit": (60, 93, None), "exit_group": (231, 94, None),
    "getpid": (39, 172, None), "gettid": (186, 178, None),
    # Signals: to the process itself only, for abort()
    "rt_sigaction": (13, 134, None), "rt_sigprocmask": (14, 135, None), "rt_sigreturn": (15, 139, None),
    "sigaltstack": (131, 132, None), "restart_syscall": (219, 128, None), "tgkill": (234, 131, _OWN_PROCESS),
    "setitimer": (38, 103, _ArgumentRule(0, (0,))),  # ITIMER_REAL
    # Time, and facts about the system
    "clock_gettime": (228, 113, None), "clock_getres": (229, 114, None), "clock_nanosleep": (230, 115, None),
    "nanosleep": (35, 101, None), "gettimeofday": (96, 169, None), "getrandom": (318, 278, None),
    "uname": (63, 160, None), "sysinfo": (99, 179, None),
    # The socket, and descriptors that came over it or are /dev/null
    "recvmsg": (47, 212, None), "sendto": (44, 206, None), "read": (0, 63, None), "write": (1, 64, None),
    "writev": (20, 66, None), "lseek": (8, 62, None), "fstat": (5, 80, None), "close": (3, 57, None),
    "fcntl": (72, 25, _ArgumentRule(1, (1030,))),  # F_DUPFD_CLOEXEC, for mmap.mmap
    "ioctl": (16, 29, _ArgumentRule(1, (0x5421,))),  # FIONBIO, for socket.settimeout
}  # fmt: skip


class _Machine(NamedTuple):
    """Numbers of one architecture.

    column: of `_ALLOWED`.
    architecture: its number in audit messages.
    seccomp: number of the system call.
    recent: number of `membarrier`, of Linux 4.3. Libraries can do without this call and all later ones, if
        they get ENOSYS. For example, glibc then starts threads by `clone` instead of `clone3`.
    """

    column: int
    architecture: int
    seccomp: int
    recent: int


_MACHINES = {
    "x86_64": _Machine(0, 0xC000003E, 317, 324),
    "aarch64": _Machine(1, 0xC00000B7, 277, 283),
}


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort), ("jump_true", ctypes.c_ubyte), ("jump_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint32),
    )  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def enter(memory_bytes: int) -> list[str]:
    """Give up everything that decoding does not need, for good. Return the names of the measures taken.

    memory_bytes: address space that the process may take beyond what it has now.

    Call it after everything is imported and every decoder has been used once: no file can be opened later.
    """
    taken = []
    if _change_user(_FIRST_OWN_USER + os.getpid()):
        # Counted by user, so it would count the server's threads if the user were the server's.
        _limit(resource.RLIMIT_NPROC, _MAX_THREADS)
        taken.append("a user of its own")
    elif _change_user(_NOBODY):  # in some containers there are only the usual 65,536 users
        taken.append("user nobody")
    with contextlib.suppress(OSError):
        _drop_capabilities()
        taken.append("no capabilities")
    limit_resources(memory_bytes)
    taken.append("resource limits")
    with contextlib.suppress(OSError, AttributeError):
        _filter_system_calls()
        taken.append("seccomp")
    return taken


def _change_user(number: int) -> bool:
    """Become this user and group for good. Returns whether the system allows it: for root, mostly.

    It is not done where the server could not kill the process afterwards.
    """
    with open("/proc/self/status") as file:
        capabilities = next((line.split()[1] for line in file if line.startswith("CapEff:")), "0")
    if ~int(capabilities, 16) & _KILL_AND_CHANGE_USER:
        return False
    try:
        os.setgroups([])
        os.setresgid(number, number, number)
        os.setresuid(number, number, number)
    except OSError:
        return False
    return True


def _drop_capabilities() -> None:
    """Give up all capabilities: root has them still where it could not change its user. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    head = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    if libc.capset(head, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def limit_resources(memory_bytes: int) -> None:
    """Limit this process to so many more bytes, and few open files. It can write no core dump and no file.

    Raises OSError where the system does not tell the bytes of a process.
    """
    for kind, most in (
        (resource.RLIMIT_AS, _address_space() + memory_bytes),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        _limit(kind, most)


def _limit(kind: int, most: int) -> None:
    """Lower a limit, for good."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _address_space() -> int:
    """Return the bytes of address space that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _filter_system_calls() -> None:
    """Refuse all system calls but those in `_ALLOWED`, for all threads. Raises OSError if that fails."""
    name = platform.machine()
    if name not in _MACHINES:
        raise OSError(f"no list of system calls for {name}")
    libc = ctypes.CDLL(None, use_errno=True)
    lines = _instructions(_MACHINES[name], os.getpid())
    instructions = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    program = _Program(len(lines), ctypes.cast(instructions, ctypes.POINTER(_Instruction)))
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if libc.syscall(_MACHINES[name].seccomp, _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def _instructions(machine: _Machine, process: int) -> list[tuple[int, int, int, int]]:
    """Return the filter as (code, lines to skip if true, lines to skip if false, value).

    A call under another architecture's numbers kills the process. Numbers of x32 are in no list, and refused.
    process: number of the process, which may send signals to itself.
    """
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, machine.architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    for *numbers, condition in _ALLOWED.values():
        rule = [(_RETURN, 0, 0, _ALLOW)]
        if condition is not None:
            values = (process,) if condition is _OWN_PROCESS else condition.values
            rule = [
                (_LOAD, 0, 0, _FIRST_ARGUMENT_AT + _ARGUMENT_BYTES * condition.argument),
                (_AND, 0, 0, condition.mask),
                *((_JUMP_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)),
                (_RETURN, 0, 0, _REFUSE),
                *rule,
            ]
        lines += [(_JUMP_EQUAL, 0, len(rule), numbers[machine.column]), *rule]
    return [
        *lines,
        (_JUMP_GREATER_EQUAL, 1, 0, machine.recent),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _MISSING),
    ]
