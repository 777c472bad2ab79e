"""Memory and descriptors of the stack's processes, and whether they are back at their level. Linux only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fovea.bench.session import memory_of
from fovea.core.errors import ConfigError
from tests.chaos.checker import Violation

PROC = Path("/proc")
SHARE, LEAST_MIB, LEAST_DESCRIPTORS = 0.05, 2.0, 3
"""Largest growth as a share of the level after the warm-up, or in MiB and descriptors if these are more."""


@dataclass(frozen=True, slots=True)
class Level:
    """Memory and descriptors of a program with all its processes.

    born: when its first process was started, in ticks of the kernel; another number is another process.
    """

    resident_mib: float
    descriptors: int
    processes: int
    born: int


def level_of(pid: int) -> Level:
    """Return the level of a process and its descendants."""
    try:
        memory = memory_of(pid)
    except ConfigError:
        return Level(0.0, 0, 0, 0)
    family = descendants(pid)
    descriptors = 0
    for member in family:
        with contextlib.suppress(OSError):
            descriptors += len(os.listdir(PROC / str(member) / "fd"))
    return Level(memory.resident_mib, descriptors, memory.processes, _born(pid))


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found, at = [pid], 0
    while at < len(found):
        with contextlib.suppress(OSError):
            for task in (PROC / str(found[at]) / "task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        at += 1
    return found


def _born(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    return 0


def compare(before: Mapping[str, Level], after: Mapping[str, Level]) -> list[Violation]:
    """Check that no program has grown by more than SHARE.

    A level may be lower, for example that of a program that was started again, whose caches are not full.
    """
    found = []
    for name, old in before.items():
        new = after[name]
        for what, was, now, least in (
            ("MiB", old.resident_mib, new.resident_mib, LEAST_MIB),
            ("descriptors", old.descriptors, new.descriptors, LEAST_DESCRIPTORS),
        ):
            if now > was + max(SHARE * was, least):
                found.append(
                    Violation("level", name, f"{was:.0f} {what} after the warm-up, {now:.0f} at the end")
                )
    return found
