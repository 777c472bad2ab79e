"""Makes checks one after the other. A check that breaks is a failure, and the others are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.core.errors import FoveaError
from fovea.doctor.check import Check, missing
from fovea.doctor.subject import Subject
from fovea.doctor.verdict import Status, Verdict, failed, not_applicable
from fovea.doctor.web import NoAnswer


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
    checks: Sequence[Check],
    subject: Subject,
    begin: Callable[[Check], None] = lambda check: None,
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
