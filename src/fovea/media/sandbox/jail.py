"""Takes rights from a decoding process before it sees its first file.

Each measure is taken where the system has it; `enter` returns the names of those that were taken. Together
they leave a decoder that was taken over by its input with its own memory, its socket to the server, and
nothing else: no files, no network, no other process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource

_NOBODY = 65534
_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE, _MISSING = 0x00050001, 0x00050026  # the call returns EPERM or ENOSYS
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_CLONE_THREAD = 0x10000
_X32 = 0x40000000

_NEW_CALLS = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "pidfd_send_signal": 424,
    "pidfd_open": 434, "openat2": 437, "pidfd_getfd": 438,
}  # fmt: skip
"""System calls with one number on all architectures."""

_CALLS: dict[str, tuple[int, int, int, dict[str, int]]] = {
    # machine: (audit architecture, number of `seccomp`, number of `clone`, refused calls)
    "x86_64": (
        0xC000003E, 317, 56,
        {
            "open": 2, "creat": 85, "openat": 257, "open_by_handle_at": 304, "execve": 59, "execveat": 322,
            "fork": 57, "vfork": 58, "socket": 41, "socketpair": 53, "connect": 42, "bind": 49, "listen": 50,
            "accept": 43, "accept4": 288, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
            "kill": 62, "tkill": 200, "tgkill": 234, "truncate": 76, "unlink": 87, "unlinkat": 263,
            "rename": 82, "renameat": 264, "renameat2": 316, "link": 86, "linkat": 265, "symlink": 88,
            "symlinkat": 266, "mkdir": 83, "mkdirat": 258, "rmdir": 84, "mknod": 133, "mknodat": 259,
            "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94,
            "fchownat": 260, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272,
            "setns": 308, "bpf": 321, "add_key": 248, "request_key": 249, "keyctl": 250, "init_module": 175,
            "finit_module": 313, "delete_module": 176, "perf_event_open": 298, "userfaultfd": 323,
            "kexec_load": 246, "reboot": 169, "shmget": 29, "semget": 64, "msgget": 68, "personality": 135,
            "name_to_handle_at": 303, "fanotify_init": 300, "prlimit64": 302,
        },
    ),
    "aarch64": (
        0xC00000B7, 277, 220,
        {
            "openat": 56, "open_by_handle_at": 265, "execve": 221, "execveat": 281, "socket": 198,
            "socketpair": 199, "bind": 200, "listen": 201, "accept": 202, "connect": 203, "accept4": 242,
            "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kill": 129, "tkill": 130,
            "tgkill": 131, "truncate": 45, "unlinkat": 35, "renameat": 38, "renameat2": 276, "linkat": 37,
            "symlinkat": 36, "mkdirat": 34, "mknodat": 33, "fchmod": 52, "fchmodat": 53, "fchownat": 54,
            "fchown": 55, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97,
            "setns": 268, "bpf": 280, "add_key": 217, "request_key": 218, "keyctl": 219, "init_module": 105,
            "finit_module": 273, "delete_module": 106, "perf_event_open": 241, "userfaultfd": 282,
            "kexec_load": 104, "reboot": 142, "shmget": 194, "semget": 190, "msgget": 186, "personality": 92,
            "name_to_handle_at": 264, "fanotify_init": 262, "prlimit64": 261,
        },
    ),
}  # fmt: skip
_CLONE3 = 435


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
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # in some containers there is no such user
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            taken.append("no root")
    limit_resources(memory_bytes)
    taken.append("resource limits")
    with contextlib.suppress(OSError, AttributeError):
        _filter_system_calls()
        taken.append("seccomp")
    return taken


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
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _address_space() -> int:
    """Return the bytes of address space that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _filter_system_calls() -> None:
    """Refuse the system calls in `_CALLS`, for all threads. Raises OSError where that is not possible."""
    machine = platform.machine()
    if machine not in _CALLS:
        raise OSError(f"no list of system calls for {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = _program(machine)
    program = _Program(len(instructions), ctypes.cast(instructions, ctypes.POINTER(_Instruction)))
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    seccomp = _CALLS[machine][1]
    if libc.syscall(seccomp, _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def _program(machine: str) -> ctypes.Array[_Instruction]:
    """Return the filter: kill under another architecture's numbers, refuse listed calls, allow the rest.

    New threads are allowed and new processes are not: both are `clone`, told apart by a flag.
    """
    architecture, _, clone, calls = _CALLS[machine]
    refused = sorted({*calls.values(), *_NEW_CALLS.values()})
    tests = [(_CLONE3, "missing"), (clone, "clone"), *((number, "refuse") for number in refused)]
    start = 5
    ends = {"allow": start + len(tests)}
    ends["refuse"] = ends["allow"] + 1
    ends["missing"] = ends["allow"] + 2
    ends["clone"] = ends["allow"] + 3
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_GREATER_EQUAL, ends["refuse"] - start, 0, _X32),
    ]
    lines += [
        (_JUMP_EQUAL, ends[end] - (start + at) - 1, 0, number) for at, (number, end) in enumerate(tests)
    ]
    lines += [
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _MISSING),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
