"""A histogram that is kept by one thread and read by others, without a lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import inf


def bucket_key(name: str, upper: float) -> str:
    """Return the name of the figure: values up to a bucket's upper bound. inf: all values."""
    return f"{name}_le_{upper:g}"


def sum_key(name: str) -> str:
    """Return the name of the figure: sum of all values."""
    return f"{name}_sum"


def keys_of(name: str, uppers: Sequence[float]) -> tuple[str, ...]:
    """Return the names of all figures of a histogram."""
    return (*(bucket_key(name, upper) for upper in (*uppers, inf)), sum_key(name))


class Tally:
    """Counts values by bucket.

    uppers: upper bounds of the buckets, ascending. A value equal to a bound belongs to its bucket. A last
        bucket has no bound.
    """

    __slots__ = ("_counts", "_keys", "_sum", "_sum_key", "_uppers")

    def __init__(self, name: str, uppers: Sequence[float]) -> None:
        self._uppers = tuple(uppers)
        *self._keys, self._sum_key = keys_of(name, uppers)
        self._counts = [0] * len(self._keys)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._uppers, value)] += 1
        self._sum += value

    def stats(self) -> Mapping[str, float]:
        """Return the cumulative counts and the sum by the names of `bucket_key` and `sum_key`."""
        figures: dict[str, float] = {self._sum_key: self._sum}
        below = 0
        for key, count in zip(self._keys, self._counts.copy(), strict=True):
            below += count
            figures[key] = below
        return figures
