"""The summary of a chaos day, as docs/reliability.md shows it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from tests.chaos.checker import Violation
from tests.chaos.faults import Log
from tests.chaos.levels import Level
from tests.chaos.load import Tally
from tests.chaos.report import Report


def report(violations: list[Violation]) -> Report:
    load: Any = SimpleNamespace(
        kinds=Counter(text=9), happened=[1, 2], receipts={}, parts={},
        tallies={
            "kill engine": Tally(Counter(ok=3, cut=1), 4),
            "no fault": Tally(Counter(ok=5), 5),
        },
    )  # fmt: skip
    level = Level(100.0, 20, 1, 7)
    return Report(
        3, 20, load, Log({}, {"kill engine": [6.0, 8.0]}), Counter({"batch accepted": 2}),
        {"redis": level}, {"redis": cast(Any, level)}, violations, (), (50, 50),
    )  # fmt: skip


def test_a_summary_has_the_sums_of_all_faults() -> None:
    text = report([]).summary()
    assert "In all: 8 ok, 0 degraded, 0 refused, 1 cut, 0 cancelled, 0 damaged, 0 wrong." in text
    assert "Median recovery in seconds, and the longest: kill engine 8.0 (8.0)." in text
    assert "MiB after the warm-up and at the end: redis 100 to 100." in text
    assert "|" not in text


def test_a_summary_names_violations() -> None:
    text = report([Violation("hang", "marker-1", "no end after 37 s")]).summary()
    assert "- **hang**: 1" in text
    assert "No invariant" not in text
