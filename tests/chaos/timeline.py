"""The schedule of a chaos day: which fault begins when, by a seed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

FAULT_S, REST_S = 9.0, 9.0
"""Seconds of a fault, and of the rest after it in which the stack has to recover."""
LATE_S = 7.0
"""Seconds after a fault in which a request may still fail because of it."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A fault between two times, in seconds since the start of the load.

    number: its place in the schedule. kind: name of the fault in the catalogue.
    """

    number: int
    kind: str
    begin_s: float
    end_s: float

    def may_disturb(self, begin_s: float, end_s: float) -> bool:
        """Whether a request of that span may show the fault."""
        return begin_s < self.end_s + LATE_S and end_s > self.begin_s


def timeline(seed: int, begin_s: float, end_s: float, kinds: Sequence[str]) -> list[Episode]:
    """Return the episodes between two times: all kinds once in random order, then all again, and so on.

    If the time is too short for one round, faults and rests are made shorter, down to a third.
    """
    room = max(0.0, end_s - begin_s)
    scale = min(1.0, max(1 / 3, room / max(1, len(kinds)) / (FAULT_S + REST_S)))
    fault_s, rest_s = FAULT_S * scale, REST_S * scale
    rng, episodes, at = Random(f"{seed}/timeline"), list[Episode](), begin_s
    waiting: list[str] = []
    while at + fault_s + rest_s <= end_s + 1e-6:
        if not waiting:
            waiting = list(kinds)
            rng.shuffle(waiting)
        episodes.append(Episode(len(episodes), waiting.pop(), at, at + fault_s))
        at += fault_s + rest_s
    return episodes
