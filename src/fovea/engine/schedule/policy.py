"""Who is tried first when there is room: an order over the waiting, nothing else.

A policy sees sequences of two kinds. A *ready* one needs no encoder: it is text, or its next image is encoded already. The
others wait for an image. What a policy can not do is starve anybody: the scheduler counts how often a sequence is
passed by a later one, and beyond a bound nobody else is admitted before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fovea.engine.sequence import Sequence as Request

Ready = Callable[[Request], bool]


class Policy(Protocol):
    """strict: whether one that can not join yet, its image not being encoded, holds back all behind it."""

    strict: bool

    def order(self, waiting: Sequence[Request], ready: Ready) -> Sequence[Request]:
        """`waiting` comes in order of arrival. Called once a step; must return each of them once."""
        ...


class FirstCome:
    """In order of arrival, and nobody passes: what engines do that know no images."""

    strict = True

    def order(self, waiting: Sequence[Request], ready: Ready) -> Sequence[Request]:
        return waiting


class Dual:
    """Two queues, each in order of arrival. Text, follow-ups and known images do not wait behind new images.

    The composition adapts: the ready go first, unless more than `long` requests wait for images and fewer for anything
    else; then those whose images are encoded take turns with the ready ones. (The queue of images itself is worked off
    by the encoder at its own pace, so being second here costs an image request nothing while it is being encoded.)
    """

    strict = False

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
    """Smaller numbers of `priority` first, then as `Dual` has it."""

    strict = False

    def __init__(self) -> None:
        self._dual = Dual()

    def order(self, waiting: Sequence[Request], ready: Ready) -> Sequence[Request]:
        return sorted(self._dual.order(waiting, ready), key=lambda seq: seq.priority)


class Detail:
    """Ready requests of about the same visual cost side by side, cheap ones first, so that a step's chunks are alike."""

    strict = False
    edges = (0, 64, 256, 1024)

    def order(self, waiting: Sequence[Request], ready: Ready) -> Sequence[Request]:
        def cluster(seq: Request) -> tuple[bool, int]:
            tokens = sum(span.tokens for span in seq.spans)
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
