"""Processor time, threads and memory of a process and all its descendants."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from fovea.bench.session import memory_of

PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""Resolution of the times in /proc."""
CPU_CLOCK = 2
"""The clock that counts the time in which any thread of a process ran; CPUCLOCK_SCHED in Linux."""


@dataclass(frozen=True)
class Usage:
    """The use of a family of processes until now.

    clock_s: seconds of processor time, user and system, from the processes' clocks (nanoseconds resolution),
        with those of children that have ended and were waited for.
    stat_s: the time in /proc/PID/stat, in whole ticks for each process; it has to agree with `clock_s`.
    resident_mib: resident memory in MiB; memory that processes share counts for each of them.
    """

    clock_s: float
    stat_s: float
    threads: int
    processes: int
    resident_mib: float


def family(pid: int, proc: Path = PROC) -> list[int]:
    """A process and its descendants. Raises ProcessLookupError if it does not exist."""
    parents = {}
    for path in proc.glob("[0-9]*/stat"):
        if (fields := _stat(path)) is not None:
            parents[int(path.parent.name)] = int(fields[1])
    if pid not in parents:
        raise ProcessLookupError(f"there is no process {pid}")
    found, new = [pid], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def usage(pid: int) -> Usage:
    """Measure a family of processes. Raises ProcessLookupError if the process does not exist."""
    clock = stat = 0.0
    threads = 0
    pids = family(pid)
    for member in pids:
        fields = _stat(PROC / str(member) / "stat")
        if fields is None:
            continue
        user, system, ended_user, ended_system = (int(field) * TICK_S for field in fields[11:15])
        ended = ended_user + ended_system
        stat += user + system + ended
        clock += clock_of(member) + ended
        threads += int(fields[17])
    return Usage(clock, stat, threads, len(pids), memory_of(pid).resident_mib)


def clock_of(pid: int) -> float:
    """Processor time of one process in seconds, by its clock. 0 if the process has ended.

    The number of the clock is that of clock_getcpuclockid(3).
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | CPU_CLOCK) / 1e9
    except OSError:
        return 0.0


def _stat(path: Path) -> list[str] | None:
    """The fields of a stat file after the name, from the state on. None if the process has ended."""
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
