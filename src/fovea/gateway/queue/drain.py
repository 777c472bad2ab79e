"""The rate at which requests end, for estimates of waits."""

from __future__ import annotations

import math

MEMORY_S = 20.0
"""Seconds after which a measurement counts 1/e."""
SHORTEST_S, LONGEST_S = 1.0, 60.0
"""Bounds of an estimate. The capacity changes too often for more than a minute."""


class Drain:
    """Tokens that ended per second, as an average that forgets exponentially."""

    __slots__ = ("_first_s", "_last_s", "_sum")

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._last_s = 0.0
        self._sum = 0.0

    def add(self, tokens: int, now_s: float) -> None:
        """Count the tokens of a request that has ended."""
        if self._first_s is None:
            self._first_s = self._last_s = now_s
        self._sum = self._sum * math.exp((self._last_s - now_s) / MEMORY_S) + tokens
        self._last_s = now_s

    def rate(self, now_s: float) -> float:
        """Return the tokens per second; 0 if nothing has ended yet."""
        if self._first_s is None:
            return 0.0
        # A sum over a time t since the first request stands for MEMORY_S * (1 - exp(-t / MEMORY_S)) seconds.
        spanned = MEMORY_S * -math.expm1(-max(now_s - self._first_s, 1.0) / MEMORY_S)
        return self._sum * math.exp((self._last_s - now_s) / MEMORY_S) / spanned

    def seconds(self, tokens: int, now_s: float) -> float:
        """Estimate the seconds in which this many tokens end, within the bounds.

        The longest time if nothing has ended yet, or not for long.
        """
        rate = self.rate(now_s)
        return min(LONGEST_S, max(SHORTEST_S, tokens / rate)) if rate > 0 else LONGEST_S
