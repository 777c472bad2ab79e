"""Scheduling policies: the order in which waiting sequences are admitted when there is room.

A policy distinguishes two kinds of sequences. A *ready* one needs no encoder: it is text, or its first
image is already encoded. The others wait for an image. A policy cannot starve a sequence: the scheduler
counts how often a sequence is passed by a later one, and beyond a bound it admits no later one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fovea.engine.sequence import Sequence as Request

Ready = Callable[[Request], bool]


class Policy(Protocol):
    """An order over waiting sequences.

    strict: a sequence that cannot join yet, because its image is not encoded, holds back all sequences after
        it.
    fair: clients take turns, and prompts that are short beside the longest one get a share of each step.
    """

    strict: bool
    fair: bool

    def order(self, waiting: Sequence[Request], ready: Ready) -> Sequence[Request]:
        """Return the waiting sequences in the order in which they are tried; each exactly once.

        Called once per step.
        waiting: sequences in order of arrival.
        ready: tells whether a sequence needs no encoder.
        """
        ...


class FirstCome:
    """First come, first served: strictly in order of arrival, as in engines for text."""

    strict = True
    fair = False

    def order(self, waiting: Sequence[Request], ready: Ready) -> Sequence[Request]:
        return waiting


class Dual:
    """Two queues, each in order of arrival: ready sequences, and those whose image must be encoded.

    So text, follow-ups and known images do not wait behind new images. Ready sequences go first, in order of
    arrival. When more than `long` sequences wait for images and at most `long` sequences are ready, the ready
    sequences with images and those without take turns. (The images of the second queue are encoded while the
    first queue computes, so the second place costs little.)
    """

    strict = False
    fair = True

    def __init__(self, long: int = 16) -> None:
        self.long = long

    def order(self, waiting: Sequence[Request], ready: Ready) -> Sequence[Request]:
        first = [seq for seq in waiting if ready(seq)]
        second = [seq for seq in waiting if not ready(seq)]
        if len(second) > self.long and len(first) <= self.long:
            with_image = [seq for seq in first if seq.spans]
            text = [seq for seq in first if not seq.spans]
            first = _in_turn(with_image, text)
        return [*first, *second]


class Priority:
    """Smaller numbers of `priority` first; within one priority, the order of `Dual`."""

    strict = False
    fair = False

    def __init__(self) -> None:
        self._dual = Dual()

    def order(self, waiting: Sequence[Request], ready: Ready) -> Sequence[Request]:
        return sorted(self._dual.order(waiting, ready), key=lambda seq: seq.priority)


class Detail:
    """Ready sequences first, and among them those with fewer visual tokens, in groups of similar cost.

    So the chunks of one step have similar sizes.
    edges: bounds between the groups, in visual tokens.
    """

    strict = False
    fair = True
    edges = (0, 64, 256, 1024)

    def order(self, waiting: Sequence[Request], ready: Ready) -> Sequence[Request]:
        def cluster(seq: Request) -> tuple[bool, int]:
            tokens = sum(span.rows for span in seq.spans)
            return not ready(seq), sum(tokens > edge for edge in self.edges)

        return sorted(waiting, key=cluster)


def _in_turn(one: list[Request], other: list[Request]) -> list[Request]:
    paired = [seq for pair in zip(one, other, strict=False) for seq in pair]
    rest = one[len(other) :] or other[len(one) :]
    return [*paired, *rest]


POLICIES: dict[str, Callable[[], Policy]] = {
    "dual": Dual,
    "fcfs": FirstCome,
    "priority": Priority,
    "detail": Detail,
}
