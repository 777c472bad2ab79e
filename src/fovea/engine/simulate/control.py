"""The baseline that `Pace` is compared with: a batch controller by rule of thumb.

Keep the mean of the last ten step latencies. Above 1.2 times the target, let two sequences less run (one at least);
below 0.8 times, two more (up to the configured maximum). It knows nothing of what a step is made of, so it answers a
long prompt or an image, which the size of the batch does not cause, by shrinking the batch.
"""

from __future__ import annotations

from collections import deque

WINDOW = 10
HIGH, LOW = 1.2, 0.8
CHANGE = 2


class BatchRule:
    def __init__(self, target_s: float, maximum: int) -> None:
        self.target_s = target_s
        self.maximum = maximum
        self._allowed = maximum
        self._latest: deque[float] = deque(maxlen=WINDOW)

    def allowed(self) -> int:
        """Sequences that may run now."""
        return self._allowed

    def observe(self, seconds: float) -> None:
        self._latest.append(seconds)
        mean = sum(self._latest) / len(self._latest)
        if mean > HIGH * self.target_s:
            self._allowed = max(1, self._allowed - CHANGE)
        elif mean < LOW * self.target_s:
            self._allowed = min(self.maximum, self._allowed + CHANGE)
