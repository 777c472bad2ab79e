"""Checks as values, and what each of them needs before it can be made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from fovea.core.errors import ConfigError
from fovea.doctor.subject import Subject
from fovea.doctor.verdict import Verdict

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
