"""The number of sequences that may run at once, chosen so that the gap between tokens stays within a target.

`DecodeBound` uses the time of the decodes alone: the seconds of a step minus the time that prompts and images
took in the same step, because the pace (schedule/pace.py) limits those. `BatchRule` is a simple rule, used
for comparison. It uses the time of whole steps, so it shrinks the batch also when a long prompt or an image
made the steps long.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Protocol

WINDOW = 10
"""Number of latest measurements that a decision uses."""
HIGH, LOW = 1.2, 0.8
"""Shares of the target: `BatchRule` shrinks above HIGH; below LOW, both rules grow."""
LEAST_SCALE = 0.6
"""`DecodeBound` shrinks the batch at once to this share at least."""
CHANGE = 2
"""Number of sequences that `BatchRule` adds or removes at once."""
MAX_BESIDE = 0.5
"""Steps in which prompts and images took more than this share of the time are not used as measurements."""


class BatchControl(Protocol):
    """A rule that bounds the number of running sequences, from the measured duration of steps."""

    def allowed(self) -> int:
        """How many sequences may run now. Sequences above that number that run already continue."""
        ...

    def observe(self, decodes: int, seconds: float, prompt_and_image_s: float) -> None:
        """Record a step of `seconds` seconds with `decodes` decodes.

        prompt_and_image_s: estimate of the part of these seconds that prompts and images took.
        """
        ...


class DecodeBound:
    """Bound the batch so that a step with decodes alone takes at most the target.

    The bound adapts to measurements: it grows by 10% when a full batch decodes in less than 80% of the
    target, and it is scaled by target / measured time (at least 0.6) when the decodes take longer than the
    target.
    target_s: longest time of a step's decodes in seconds; 0 for no bound.
    maximum: most sequences.
    """

    def __init__(self, target_s: float, maximum: int) -> None:
        self.target_s = target_s
        self.maximum = maximum
        self._allowed = maximum
        self._latest: deque[float] = deque(maxlen=WINDOW)

    def allowed(self) -> int:
        return self._allowed

    def observe(self, decodes: int, seconds: float, prompt_and_image_s: float) -> None:
        if not self.target_s or not decodes or prompt_and_image_s > MAX_BESIDE * seconds:
            return
        self._latest.append((seconds - prompt_and_image_s) / decodes)
        if len(self._latest) < WINDOW:
            return
        # Times per sequence, because the batch size differs from step to step; the median, because of
        # outliers.
        decode_s = statistics.median(self._latest) * decodes
        if decode_s > self.target_s and decodes <= self._allowed:
            self._allowed = max(1, int(decodes * max(LEAST_SCALE, self.target_s / decode_s)))
        elif decode_s < LOW * self.target_s and decodes >= self._allowed < self.maximum:
            self._allowed = min(self.maximum, self._allowed + max(1, self._allowed // 10))
        else:
            return
        self._latest.clear()


class BatchRule:
    """A simple rule on the mean of the last ten step latencies, for comparison.

    Above 1.2 times the target, two sequences fewer may run (at least one); below 0.8 times the target, two
    more (at most `maximum`).
    """

    def __init__(self, target_s: float, maximum: int) -> None:
        self.target_s = target_s
        self.maximum = maximum
        self._allowed = maximum
        self._latest: deque[float] = deque(maxlen=WINDOW)

    def allowed(self) -> int:
        return self._allowed

    def observe(self, decodes: int, seconds: float, prompt_and_image_s: float) -> None:
        self._latest.append(seconds)
        mean = sum(self._latest) / len(self._latest)
        if mean > HIGH * self.target_s:
            self._allowed = max(1, self._allowed - CHANGE)
        elif mean < LOW * self.target_s:
            self._allowed = min(self.maximum, self._allowed + CHANGE)
