"""The growth of a counter per second, over the last minute."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
SPACING_S = 1.0
"""Least distance of two samples, so that frequent scrapes do not make the window large."""


class RateWindow:
    """Samples of one counter. They are taken when the metrics are scraped, by however many scrapers.

    start: time of the first sample, at which the counter was 0.
    """

    def __init__(self, start: float) -> None:
        self._samples: deque[tuple[float, float]] = deque([(start, 0.0)])

    def rate(self, now: float, value: float) -> float:
        """Return the growth per second since the oldest sample of the window, which may be a little older."""
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        if now - self._samples[-1][0] >= SPACING_S:
            self._samples.append((now, value))
        return max(0.0, value - before) / (now - since) if now > since else 0.0
