"""A case: a subject, one of the checks, and the verdict that it must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fovea.doctor.check import Status
from fovea.doctor.subject import Subject


class Case(NamedTuple):
    """One case. make: returns the subject. words: that the verdict's text has to contain."""

    path: str
    status: Status
    make: Callable[[], Subject]
    words: str


def case(path: str, status: Status, make: Callable[[], Subject], words: str = "") -> Case:
    """Return a case."""
    return Case(path, status, make, words)
