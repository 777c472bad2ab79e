"""The system calls that a decoder may make, and all others, tried by their numbers."""

from __future__ import annotations

import errno
import json
import os
import platform
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "attack"))

import taken_over

from fovea.media.limits import MediaLimits
from fovea.media.sandbox import jail
from fovea.media.sandbox.process import WorkerProcess

SWEEP = """
import ctypes, json, os, sys
from fovea.media.sandbox import jail
libc = ctypes.CDLL(None, use_errno=True)
measures = jail.enter(256 << 20)
errors = []
for number in sys.argv[1:]:
    result = libc.syscall(ctypes.c_long(int(number)), *[ctypes.c_long(0)] * 6)
    errors.append(ctypes.get_errno() if result == -1 else 0)
os.write(1, json.dumps([measures, errors]).encode())
"""
FOREIGN = """
import ctypes, json, mmap, os
from fovea.media.sandbox import jail
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
go = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
measures = jail.enter(256 << 20)
os.write(1, json.dumps([measures, []]).encode())
go()
"""
INTEL = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86-64")


def jailed(code: str, *arguments: str) -> tuple[Any, int]:
    """Run code in a new process. Returns what it printed as JSON, and how it ended."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, timeout=60)
    assert done.stdout, done.stderr.decode()[-2000:]
    measures, seen = json.loads(done.stdout)
    skip_without_seccomp(measures)
    return seen, done.returncode


def skip_without_seccomp(measures: list[str]) -> None:
    if "seccomp" not in measures:
        pytest.skip("this system has no seccomp")


def decide(machine: str, number: int, *arguments: int, own: int = 77, architecture: int = 0) -> str:
    """Run the filter as the kernel does, for a call of process 77."""
    facts = jail._MACHINES[machine]
    data = {jail._NUMBER_AT: number, jail._ARCHITECTURE_AT: architecture or facts.architecture}
    data |= {16 + 8 * at: value & 0xFFFFFFFF for at, value in enumerate((*arguments, *[0] * 6)[:6])}
    lines, at, register = jail._instructions(facts, own), 0, 0
    ends = {jail._ALLOW: "allow", jail._REFUSE: "refuse", jail._MISSING: "missing", jail._KILL: "kill"}
    while True:
        code, if_true, if_false, value = lines[at]
        at += 1
        if code == jail._RETURN:
            return ends[value]
        if code == jail._LOAD:
            register = data[value]
        elif code == jail._AND:
            register &= value
        else:
            true = register == value if code == jail._JUMP_EQUAL else register >= value
            at += if_true if true else if_false


@pytest.mark.skipif(platform.machine() not in jail._MACHINES, reason="no list of system calls")
def test_every_known_way_out_is_refused() -> None:
    """The jail was a list of refused calls: rt_sigqueueinfo killed the server, and fchmodat2 changed files.

    The attacker keeps the rights of this process, so nothing but the filter stops it. The victim lives on.
    Threads still start, and abort() still ends the process with its own signal.
    """
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as victim:
        measures, seen, threads, status = taken_over.try_calls(victim.pid)
        assert victim.poll() is None
    skip_without_seccomp(measures)
    assert taken_over.accepted(seen) == []
    assert (threads, status) == (["started"], -signal.SIGABRT)


@INTEL
def test_every_call_that_is_not_listed_is_refused() -> None:
    """Calls up to number 600, which are more than Linux has: those of later kernels are refused as well.

    335 and 336 are left out: Linux sends SIGILL to all callers but its own probes, before any filter.
    """
    allowed = {numbers[0] for numbers in jail._ALLOWED.values()}
    others = [number for number in range(601) if number not in allowed and number not in (335, 336)]
    seen, _ = jailed(SWEEP, *map(str, others), str(0x40000000), str(0x40000000 + 2))
    recent = jail._MACHINES["x86_64"].recent
    expected = [errno.EPERM if number < recent else errno.ENOSYS for number in others]
    assert seen == [*expected, errno.ENOSYS, errno.ENOSYS]


@INTEL
def test_the_numbers_of_another_architecture_kill_the_process() -> None:
    """Under 32-bit numbers, 11 is execve and 37 is kill. `int 0x80` reaches them from 64-bit code."""
    assert jailed(FOREIGN)[1] in (-signal.SIGSYS, -signal.SIGSEGV)  # SIGSEGV: the kernel has no 32-bit calls


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_each_machine_allows_its_list_only(machine: str) -> None:
    """Run by an interpreter of the filter, so that arm64 is checked on every machine."""
    facts = jail._MACHINES[machine]
    numbers = {values[facts.column]: values[2] for values in jail._ALLOWED.values()}
    assert len(numbers) == len(jail._ALLOWED)
    for number in (*range(601), 0x40000000, 0x40000009, 2**32 - 1):
        if number not in numbers:
            assert decide(machine, number) == ("refuse" if number < facts.recent else "missing")
        elif numbers[number] is None:
            assert decide(machine, number, -1, -1, -1) == "allow"
    assert decide(machine, 0, architecture=0x40000003) == "kill"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_attacks_are_refused_on_each_machine(machine: str) -> None:
    names = {"victim": 1234, "own": 77, "path": 1 << 40, "words": 1 << 41, "info": 1 << 42, "page": 1 << 43}
    for name, (intel, arm, arguments) in taken_over.CALLS.items():
        number = intel if machine == "x86_64" else arm
        if number is not None:
            assert decide(machine, number, *eval(f"[{arguments}]", names)) in ("refuse", "missing"), name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_conditions_on_arguments_leave_what_libraries_do(machine: str) -> None:
    """Threads of glibc and musl, memory without code, locks, signals to itself, and nothing near to them."""
    column = jail._MACHINES[machine].column

    def says(name: str, *arguments: int) -> str:
        number = jail._ALLOWED[name][column]
        assert isinstance(number, int)
        return decide(machine, number, *arguments)

    assert says("clone", 0x3D0F00) == says("clone", 0x7D0F00) == "allow"  # glibc, musl
    assert (
        says("mmap", 0, 4096, 3, 34)
        == says("mprotect", 0, 4096, 0)
        == says("mprotect", 0, 4096, 1)
        == "allow"
    )
    assert says("tgkill", 77, 78, 6) == "allow"
    assert says("futex", 0, 128 | 9 | 256) == says("futex", 0, 1) == "allow"
    rng = random.Random(5)
    for _ in range(2_000):
        flags, protection = rng.getrandbits(32), rng.getrandbits(32)
        thread = flags & ~0x1780000 == 0x50F00
        assert says("clone", flags) == ("allow" if thread else "refuse")
        assert says("mmap", 0, 0, protection) == ("refuse" if protection & 4 else "allow")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give each decoder a user of its own")
def test_every_decoder_is_a_user_of_its_own() -> None:
    """All decoders were `nobody`, so one that was taken over was the same user as the others."""
    users = []
    for _ in range(2):
        worker = WorkerProcess("image", MediaLimits())
        try:
            with open(f"/proc/{worker.pid}/status") as file:
                status = dict(line.split(":\t") for line in file.read().splitlines() if ":\t" in line)
        finally:
            worker.end()
        if "a user of its own" not in worker.measures:
            pytest.skip("this container has no such users")
        assert status["CapEff"] == status["CapPrm"] == "0" * 16
        users.append(status["Uid"])
    assert len({*users}) == 2
