"""The share of the machine that programs outside of this measurement take: it explains slow answers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """Measures the processor time of all other programs from its creation on.

    pids: the processes that belong to the measurement, each with its descendants.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._busy, self._own, self._idle = self._read()

    def share(self) -> float:
        """Processor time of other programs since the creation, as a share of all processors, 0 to 1."""
        busy, own, idle = self._read()
        all_of_it = busy - self._busy + idle - self._idle
        others = busy - self._busy - (own - self._own)
        return min(1.0, max(0.0, others / all_of_it)) if all_of_it > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        """Seconds: of all programs, of the measurement's processes, and idle, summed over the processors."""
        user, nice, system, idle, waiting, *rest = map(
            int, Path("/proc/stat").read_text().splitlines()[0].split()[1:8]
        )
        busy = user + nice + system + sum(rest)
        return busy / _TICKS, self._own_ticks() / _TICKS, (idle + waiting) / _TICKS

    def _own_ticks(self) -> int:
        parents: dict[int, tuple[int, int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process has ended in the meantime
            # Times of the process and of its children that have ended.
            parents[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
        family, growing = set(self._pids), True
        while growing:
            children = {pid for pid, (parent, _) in parents.items() if parent in family} - family
            family |= children
            growing = bool(children)
        return sum(parents[pid][1] for pid in family if pid in parents)
