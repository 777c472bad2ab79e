"""Verdicts: what a check found, why it matters, and the line that mends it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The outcome of a check.

    PASS: nothing is wrong. WARN: it works, but not as it should in production. FAIL: it would do harm in
    production. NOT_APPLICABLE: the check could not be made here, or there is nothing to check.
    """

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one check.

    status: the outcome.
    figure: the value that was found, in a few words; empty if the check was not made.
    reason: why the outcome is not a pass, or how the figure is to be read; may be empty.
    fix: a command, setting or action that mends it; empty for a pass.
    """

    status: Status
    figure: str = ""
    reason: str = ""
    fix: str = ""


def passed(figure: str, reason: str = "") -> Verdict:
    """Return a pass."""
    return Verdict(Status.PASS, figure, reason)


def warned(figure: str, reason: str, fix: str) -> Verdict:
    """Return a warning."""
    return Verdict(Status.WARN, figure, reason, fix)


def failed(figure: str, reason: str, fix: str) -> Verdict:
    """Return a failure."""
    return Verdict(Status.FAIL, figure, reason, fix)


def not_applicable(reason: str) -> Verdict:
    """Return the verdict of a check that was not made. reason: why."""
    return Verdict(Status.NOT_APPLICABLE, reason=reason)
