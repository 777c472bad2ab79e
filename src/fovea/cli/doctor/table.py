"""Writes the verdicts of `fovea doctor` for a terminal."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from fovea.doctor.check import Check
from fovea.doctor.examine import Result, counts
from fovea.doctor.verdict import Status

WIDTH = 110
WORDS = {Status.PASS: "pass", Status.WARN: "WARN", Status.FAIL: "FAIL", Status.NOT_APPLICABLE: "n/a"}
INDENT = " " * 9


def table(results: Sequence[Result]) -> str:
    """Return the verdicts by group, with reasons and fixes, and a last line with their numbers."""
    return "\n".join(_lines(results))


def _lines(results: Sequence[Result]) -> Iterator[str]:
    for group, members in groupby(results, lambda result: result.check.group):
        yield group
        for result in members:
            yield from _result(result)
    numbers = ", ".join(f"{count} {status}" for status, count in counts(results).items())
    yield ""
    yield f"{numbers}; {sum(result.seconds for result in results):.0f} s"


def _result(result: Result) -> Iterator[str]:
    verdict = result.verdict
    head = f"  {WORDS[verdict.status]:<5}{result.check.name}: "
    yield from _wrapped(verdict.figure or verdict.reason, head)
    if verdict.figure and verdict.reason:
        yield from _wrapped(verdict.reason, INDENT)
    if verdict.fix:
        yield from _wrapped(verdict.fix, f"{INDENT}fix: ")


def _wrapped(text: str, first: str) -> list[str]:
    """Break a text into lines. Characters that a terminal would not print are replaced."""
    plain = "".join(char if char.isprintable() else "?" for char in text)
    return textwrap.wrap(
        plain, WIDTH, initial_indent=first, subsequent_indent=INDENT, break_on_hyphens=False
    ) or [first.rstrip()]


class Progress:
    """The name of the check that is being made, on stderr, if stderr is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._status = Console(stderr=True).status("") if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def begin(self, check: Check) -> None:
        """Show the name of a check."""
        if self._status is not None:
            self._status.update(check.path)
