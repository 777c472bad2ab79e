"""How many sequences may run, so that tokens come within a target.

`DecodeBound` looks at what the batch alone costs: a step's seconds less what prompts and images took beside it, which is
the pace's business. `BatchRule` is the rule of thumb that it is compared with; it sees whole steps, so it answers a long
prompt or an image, which the size of the batch does not cause, by shrinking the batch.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Protocol

WINDOW = 10
HIGH, LOW = 1.2, 0.8
CHANGE = 2
SURE = 0.5
"""A step of which prompts and images took more than this share says little about its decodes."""


class BatchControl(Protocol):
    def allowed(self) -> int:
        """Sequences that may run now; those that do already are left to finish."""
        ...

    def observe(self, decodes: int, seconds: float, beside_s: float) -> None:
        """A step with that many decodes; beside_s: about what prompts and images took of its `seconds`."""
        ...


class DecodeBound:
    """As many as decode within the target, found by trying: a tenth more where all of them decode well within it, and the
    share that the target is of what they take where they do not. target_s: 0 is no bound.
    """

    def __init__(self, target_s: float, maximum: int) -> None:
        self.target_s = target_s
        self.maximum = maximum
        self._allowed = maximum
        self._latest: deque[float] = deque(maxlen=WINDOW)

    def allowed(self) -> int:
        return self._allowed

    def observe(self, decodes: int, seconds: float, beside_s: float) -> None:
        if not self.target_s or not decodes or beside_s > SURE * seconds:
            return
        self._latest.append((seconds - beside_s) / decodes)
        if len(self._latest) < WINDOW:
            return
        # By sequence, since neighbouring steps differ in how many they are; the median, since a machine hiccups.
        took = statistics.median(self._latest) * decodes
        if took > self.target_s and decodes <= self._allowed:
            self._allowed = max(1, int(decodes * max(HIGH / 2, self.target_s / took)))
        elif took < LOW * self.target_s and decodes >= self._allowed < self.maximum:
            self._allowed = min(self.maximum, self._allowed + max(1, self._allowed // 10))
        else:
            return
        self._latest.clear()


class BatchRule:
    """Keep the mean of the last ten step latencies. Above 1.2 times the target, let two sequences less run (one at least);
    below 0.8 times, two more (up to the configured maximum).
    """

    def __init__(self, target_s: float, maximum: int) -> None:
        self.target_s = target_s
        self.maximum = maximum
        self._allowed = maximum
        self._latest: deque[float] = deque(maxlen=WINDOW)

    def allowed(self) -> int:
        return self._allowed

    def observe(self, decodes: int, seconds: float, beside_s: float) -> None:
        self._latest.append(seconds)
        mean = sum(self._latest) / len(self._latest)
        if mean > HIGH * self.target_s:
            self._allowed = max(1, self._allowed - CHANGE)
        elif mean < LOW * self.target_s:
            self._allowed = min(self.maximum, self._allowed + CHANGE)
