"""The lines at the end of a run of the tests: processor time, and tests that lacked a program.

The processor time of a test is that of its process and of the processes that it started and waited for, with
its fixtures. A fixture of a whole module counts for the test that needed it first.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest

from fovea.core.markdown import markdown_table
from tests.support import forks
from tests.support.programs import MISSING

SLOWEST = 10


def processor_s() -> float:
    """Seconds of processor time of this process, and of its children and forks that have ended."""
    return sum(os.times()[:4]) + sum(forks.USED_US) / 1e6


class Summary:
    """Collects the results of a run, with or without worker processes."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._missing: Counter[str] = Counter()
        self._other = 0

    def add(self, report: pytest.TestReport) -> None:
        """Count the report of a phase of a test. Its property `processor_s` is that of the phase."""
        self._seconds[report.nodeid] += dict(report.user_properties).get("processor_s", 0.0)
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
            if reason.startswith(MISSING):
                self._missing.update(reason.removeprefix(MISSING).split(", "))
            else:
                self._other += 1

    def lines(self, *, folders: bool) -> Iterable[str]:
        """Lines for the end of the run. folders: with a table of the processor time of each folder."""
        slowest = sorted(self._seconds.items(), key=lambda each: -each[1])[:SLOWEST]
        if slowest:
            yield f"The {SLOWEST} slowest tests, in seconds of processor time:"
        yield from (f"{seconds:6.1f}  {name}" for name, seconds in slowest)
        if folders:
            yield from self._table()
        if self._missing:
            names = ", ".join(f"{name} ({count})" for name, count in sorted(self._missing.items()))
            yield f"Skipped, because a program is missing (see docs/testing.md): {names}"
        if self._other:
            yield f"Skipped for other reasons (shown by -rs): {self._other}"

    def _table(self) -> Iterable[str]:
        folders: defaultdict[str, list[float]] = defaultdict(list)
        for name, seconds in self._seconds.items():
            parts = name.partition("::")[0].split("/")
            folders["/".join(parts[:3] if parts[1:2] == ["engine"] and len(parts) > 3 else parts[:2])].append(
                seconds
            )
        rows = [
            (f"`{folder}`", f"{len(all_of_it):,}", f"{sum(all_of_it):.0f}")
            for folder, all_of_it in sorted(folders.items(), key=lambda each: -sum(each[1]))
        ]
        total = ("all", f"{sum(map(len, folders.values())):,}", f"{sum(map(sum, folders.values())):.0f}")
        yield markdown_table(("tests", "number", "processor time, s"), [*rows, total])
