"""Memory usage of a server's processes, read from /proc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import ConfigError

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process and its descendants, in MiB.

    peak_mib: the sum of each process's highest resident size since its start. With several processes this is
        an upper bound: their peaks may fall at different times, and shared memory counts once per process.
    resident_mib: the sum of the resident sizes now.
    processes: number of processes.
    """

    peak_mib: float
    resident_mib: float
    processes: int


def memory_of(pid: int, proc: Path = PROC) -> Memory:
    """Memory of process `pid` and all its descendants. Raises ConfigError if there is no such process."""
    statuses = _statuses(proc)
    if pid not in statuses:
        raise ConfigError(f"--pid is {pid}, and {proc} shows no such process", param="pid")
    family, growing = {pid}, True
    while growing:
        children = {number for number, status in statuses.items() if status.get("PPid", 0) in family} - family
        family |= children
        growing = bool(children)
    peak, now = (sum(statuses[number].get(name, 0) for number in family) for name in ("VmHWM", "VmRSS"))
    return Memory(peak / 1024, now / 1024, len(family))


def _statuses(proc: Path) -> dict[int, dict[str, int]]:
    """The numeric fields of every process's status file, by process id. Memory sizes are in KiB."""
    statuses = {}
    for path in proc.glob("[0-9]*/status"):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue  # the process has ended in the meantime
        pairs = (line.split() for line in lines)
        statuses[int(path.parent.name)] = {
            pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdecimal()
        }
    return statuses
