"""Bounds how often sequences that arrived later join before one that waits."""

from __future__ import annotations

from collections.abc import Iterable

from fovea.engine.sequence import Sequence


def may_pass(seq: Sequence, waiting: Iterable[Sequence], most: int) -> bool:
    """Whether the sequence may join: no sequence that arrived earlier has been passed `most` times."""
    return not any(other.times_passed >= most for other in waiting if _passes(seq, other))


def count_passes(seq: Sequence, waiting: Iterable[Sequence]) -> None:
    """Note that the sequence joins before those of the waiting ones that arrived earlier."""
    for other in waiting:
        if _passes(seq, other):
            other.times_passed += 1


def _passes(seq: Sequence, other: Sequence) -> bool:
    """Whether `seq` would pass `other`, which arrived earlier.

    A sequence that only wants its images encoded takes no place in a step, so it cannot be passed.
    """
    return (other.arrival, other.id) < (seq.arrival, seq.id) and not other.encode_only
