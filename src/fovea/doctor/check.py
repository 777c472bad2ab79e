"""Checks as values, what each of them needs before it can be made, and their verdicts.

A verdict tells what a check found, why it matters, and the line that fixes it. Checks are made one after the
other. A check that breaks is a failure, and the others are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from fovea.core.errors import ConfigError, FoveaError
from fovea.doctor.server import NoAnswer
from fovea.doctor.subject import Subject


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
    fix: a command, setting or action that solves it; empty for a pass.
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


TEXT_ALONE = "the model takes text alone"
"""The reason of checks of images that are not made."""
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
MIB, GIB = 1 << 20, 1 << 30


def size(count: float) -> str:
    """Return bytes in the largest unit that fits into them once."""
    power = 0
    while abs(count) >= 1024 and power < len(UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} {UNITS[0]}" if power == 0 else f"{count:.1f} {UNITS[power]}"


def plural(count: int, noun: str, many: str = "") -> str:
    """Return a number with its noun: "1 error", "2 errors". many: a plural other than with "s"."""
    return f"{count} {noun}" if count == 1 else f"{count} {many or noun + 's'}"


GROUPS = (
    "machine", "model", "engine", "answers", "caches", "limits", "exposure", "monitoring", "load", "faults",
)  # fmt: skip
"""Names of the groups, in the order in which they run. Faults come last because they end the server."""
LONG_GROUPS = ("load", "faults")
"""Groups that --quick leaves out."""


class Need(Enum):
    """A part of the subject without which a check cannot be made. The value is the reason, for the reader."""

    SETTINGS = "the server's settings are not known: --config FILE"
    MODEL = "there is no checkpoint: give a MODEL in place of a URL"
    OWN = "only a server that doctor starts itself can be checked so: give a MODEL in place of a URL"
    LOAD = "a live server gets load only with --destructive"
    DISTURB = "a live server is disturbed only with --destructive"
    PROMETHEUS = "not checked: --prometheus URL"
    GRAFANA = "not checked: --grafana URL"


@dataclass(frozen=True, slots=True)
class Check:
    """One item of the checklist.

    group, name: identify it, as GROUP/NAME.
    title: its subject in a few words, for people.
    run: makes the check.
    needs: parts of the subject that it cannot do without.
    """

    group: str
    name: str
    title: str
    run: Callable[[Subject], Verdict]
    needs: tuple[Need, ...] = ()

    @property
    def path(self) -> str:
        """The name with the group, as --only takes it."""
        return f"{self.group}/{self.name}"


def missing(check: Check, subject: Subject) -> Need | None:
    """Return the first need of a check that the subject lacks; None: it has all."""
    available = {
        Need.SETTINGS: subject.settings is not None,
        Need.MODEL: subject.checkpoint is not None,
        Need.OWN: subject.launcher is not None,
        Need.LOAD: subject.launcher is not None or subject.destructive,
        Need.DISTURB: subject.launcher is not None or subject.destructive,
        Need.PROMETHEUS: bool(subject.prometheus),
        Need.GRAFANA: bool(subject.grafana),
    }
    return next((need for need in check.needs if not available[need]), None)


def select(checks: Sequence[Check], only: Sequence[str], *, quick: bool) -> list[Check]:
    """Return the checks that were asked for, in their order.

    only: groups, or GROUP/NAME; empty: all. quick: leave out the groups that take long.
    Raises ConfigError for a name that is not known.
    """
    known = {check.path for check in checks} | {check.group for check in checks}
    for name in only:
        if name not in known:
            raise ConfigError(_unknown(name, sorted(known)), param="only")
    picked = [check for check in checks if not only or check.group in only or check.path in only]
    return [check for check in picked if not (quick and check.group in LONG_GROUPS)]


def _unknown(name: str, known: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"accepted: {', '.join(GROUPS)}, or GROUP/CHECK"
    return f"there is no check {name!r}; {hint}; --list prints all"


@dataclass(frozen=True, slots=True)
class Result:
    """A check with its verdict. seconds: that it took."""

    check: Check
    verdict: Verdict
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The result as an object for programs."""
        return {
            "check": self.check.path,
            "title": self.check.title,
            "status": str(self.verdict.status),
            "figure": self.verdict.figure,
            "reason": self.verdict.reason,
            "fix": self.verdict.fix,
            "seconds": round(self.seconds, 3),
        }


def examine(
    checks: Sequence[Check], subject: Subject, begin: Callable[[Check], None] = lambda check: None
) -> list[Result]:
    """Make the checks in order. begin: called before each of them."""
    results = []
    for check in checks:
        begin(check)
        begun = subject.clock()
        verdict = _verdict(check, subject)
        results.append(Result(check, verdict, subject.clock() - begun))
    return results


def exit_status(results: Sequence[Result], *, strict: bool) -> int:
    """Return 1 if a check failed, else 0. strict: a warning counts as a failure."""
    bad = (Status.FAIL, Status.WARN) if strict else (Status.FAIL,)
    return int(any(result.verdict.status in bad for result in results))


def counts(results: Sequence[Result]) -> dict[Status, int]:
    """Return how many results have each status."""
    return {status: sum(result.verdict.status is status for result in results) for status in Status}


def _verdict(check: Check, subject: Subject) -> Verdict:
    need = missing(check, subject)
    if need is not None:
        return not_applicable(need.value)
    try:
        return check.run(subject)
    except NoAnswer as error:
        return failed("no answer", str(error), "start the server, or read its log")
    except FoveaError as error:
        return failed("not possible", " ".join(error.message.split()), "read the server's log")
    except Exception as error:  # noqa: BLE001 - a foreign server may answer anything; the other checks go on
        return failed(
            "the check broke", f"{type(error).__name__}: {str(error)[:200]}", "report it with this message"
        )
