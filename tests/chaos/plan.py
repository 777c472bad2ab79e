"""Decides which fault a proxied connection gets: a pure function of the seed, its number and the window.

A window is a span of the schedule in which a proxy injects faults. A connection that lives in several windows
gets a decision in each of them, so connections that are kept open are not spared.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

Direction = Literal["request", "response"]
KINDS = (
    "latency", "slices", "bandwidth", "reset", "close", "silent", "one-way", "flip-request", "flip-response",
)  # fmt: skip
ENDS = ("reset", "close")
"""Faults after which the connection is gone."""
FLIPPED = 0xFF
"""A damaged byte. It occurs in no UTF-8 text, so a reader of JSON or of events has to notice it."""
SHARE = 0.6
"""Share of the connections of a window that get a fault."""


@dataclass(frozen=True, slots=True)
class Window:
    """A span in which a proxy injects one kind of fault. number: its place in the schedule."""

    number: int
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; accepted: {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of one connection in one window.

    direction: of the bytes that it concerns.
    after_bytes: bytes of that direction that pass before it; for flips, bytes of a message's body.
    delay_s, jitter_s: seconds before each part is passed on; jitter is the most that is added.
    slice_bytes: most bytes of one write; 0: as they come.
    bytes_per_s: rate; 0: no bound.
    """

    kind: str
    direction: Direction
    after_bytes: int = 0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    slice_bytes: int = 0
    bytes_per_s: int = 0


def plan(seed: int, connection: int, window: Window | None) -> Fault | None:
    """Return the fault of a connection, or None."""
    if window is None:
        return None
    rng = generator(seed, connection, window, "plan")
    if rng.random() >= SHARE:
        return None
    direction: Direction = "request" if rng.random() < 0.4 else "response"
    match window.kind:
        case "latency":
            return Fault("latency", direction, delay_s=rng.uniform(0.05, 0.4), jitter_s=rng.uniform(0, 0.3))
        case "slices":
            return Fault("slices", direction, slice_bytes=rng.choice((1, 2, 3, 7, 61)))
        case "bandwidth":
            return Fault("bandwidth", direction, bytes_per_s=rng.choice((20_000, 60_000, 200_000)))
        case "flip-request":
            return Fault("flip-request", "request", after_bytes=int(10 ** rng.uniform(0, 3.5)))
        case "flip-response":
            return Fault("flip-response", "response", after_bytes=int(10 ** rng.uniform(0, 2.7)))
        case "silent":
            return Fault("silent", "request")
        case kind:  # reset, close, one-way
            return Fault(kind, direction, after_bytes=int(10 ** rng.uniform(0, 3.5)))


def generator(seed: int, connection: int, window: Window, purpose: str) -> Random:
    """Return the generator of a connection's decisions for one purpose."""
    return Random(f"{seed}/{connection}/{window.number}/{window.kind}/{purpose}")
