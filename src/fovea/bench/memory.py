"""How much memory a server's processes hold, read from /proc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import ConfigError

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Memory:
    """peak_mib: highest resident size since start, added up over the processes: with several of them an upper bound, as
    each has its own moment and what they share counts for each. resident_mib: now. processes: how many there are.
    """

    peak_mib: float
    resident_mib: float
    processes: int


def memory_of(pid: int, proc: Path = PROC) -> Memory:
    """Of a process and all its descendants. Raises ConfigError when it is not there."""
    statuses = _statuses(proc)
    if pid not in statuses:
        raise ConfigError(f"--pid is {pid}, and {proc} shows no such process", param="pid")
    family, added = {pid}, True
    while added:
        more = {number for number, status in statuses.items() if status.get("PPid", 0) in family} - family
        family |= more
        added = bool(more)
    peak, now = (sum(statuses[number].get(name, 0) for number in family) for name in ("VmHWM", "VmRSS"))
    return Memory(peak / 1024, now / 1024, len(family))


def _statuses(proc: Path) -> dict[int, dict[str, int]]:
    """The numbers in every process's status; those of memory are in KiB."""
    found = {}
    for path in proc.glob("[0-9]*/status"):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue  # it has ended since
        pairs = (line.split() for line in lines)
        found[int(path.parent.name)] = {
            pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdecimal()
        }
    return found
