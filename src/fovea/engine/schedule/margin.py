"""The factor by which durations exceed their predictions: a quantile of the latest ratios.

The ratio of measured to predicted seconds is kept for the latest WINDOW predictions. A prediction, multiplied
by the quantile at a percentile, is exceeded by the remaining share, whatever the distribution of the errors
is, as long as the next error is like the latest ones. The quantile is taken one rank higher than usual, as
split conformal prediction does (Lei, G'Sell, Rinaldo, Tibshirani, Wasserman, 2018), which makes this exact
for small windows, too.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Protocol

WINDOW = 256
"""Number of latest ratios."""


class Scatter(Protocol):
    """The factor from an expected duration to a percentile of it."""

    @property
    def percentile(self) -> float: ...

    @property
    def factor(self) -> float: ...

    def observe(self, predicted: float, measured: float) -> None:
        """Learn from one duration."""
        ...


class Margin:
    """The factor that turns a prediction into a bound that a given percentage of durations keeps.

    One thread observes; others may read the factor meanwhile.

    factor: the ratio that the percentage of the latest durations did not exceed; the largest while few.
    """

    def __init__(self, percentile: float, window: int = WINDOW, first: float = 1.0) -> None:
        """Create a margin without ratios.

        percentile: percentage of the durations that should stay within the bound, below 100.
        window: number of latest ratios that count.
        first: the factor before the first ratio.
        """
        self.percentile = percentile
        self.factor = first
        self._latest: deque[float] = deque(maxlen=window)
        self._sorted: list[float] = []

    def observe(self, predicted: float, measured: float) -> None:
        """Record a duration. predicted: seconds that were expected; 0 is not recorded."""
        if predicted <= 0:
            return
        if len(self._latest) == self._latest.maxlen:
            del self._sorted[bisect_left(self._sorted, self._latest[0])]
        self._latest.append(measured / predicted)
        insort(self._sorted, measured / predicted)
        count = len(self._sorted)
        rank = math.ceil((count + 1) * self.percentile / 100)
        self.factor = self._sorted[min(rank, count) - 1]
