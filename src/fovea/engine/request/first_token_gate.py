"""Admission by the first token: a request that would be late is degraded, or refused with the figures.

Without it, a queue that is too long makes every request late. Whoever is refused at once can ask elsewhere,
or later.

Expectations are learnt from requests that entered. An expectation that is wrong, for example after a stall,
could refuse all requests of a kind, and nothing would correct it. So after PROBE refusals in a row, one such
request enters, unless its first token is expected late even without the margin of experience.
"""

from __future__ import annotations

import math
import threading
from collections import Counter

from fovea.core.errors import Overloaded
from fovea.engine.config import ScheduleSettings
from fovea.engine.schedule.first_tokens import Expectation, FirstTokens
from fovea.engine.sequence import Sequence

MOST_STEPS_DOWN = 2
"""Most steps by which the detail of images is lowered (`visual_budget.detail`)."""
PROBE = 32
"""Number of refusals in a row of requests with images to encode, or of those without, before one enters."""


class FirstTokenGate:
    """Decides whether a request enters, by its expected first token. Thread-safe.

    attempts: steps down in the detail of images that are tried one after the other until the first token is
        in time.
    refused: number of requests that were refused because their first token would have been late.
    degraded: number of requests that entered with less detail for that reason.
    """

    def __init__(self, first_tokens: FirstTokens, settings: ScheduleSettings) -> None:
        self.attempts = range(1 + MOST_STEPS_DOWN if settings.when_late == "degrade" else 1)
        self.refused = 0
        self.degraded = 0
        self._first_tokens = first_tokens
        self._lock = threading.Lock()
        self._in_a_row: Counter[bool] = Counter()
        self._target_s = 0.0 if settings.when_late == "wait" else settings.target_ttft_ms / 1000

    def expect(self, seq: Sequence) -> Expectation:
        """Predict the first token of a sequence that only describes the request."""
        return self._first_tokens.expect(seq)

    def late(self, seq: Sequence, expected: Expectation) -> bool:
        """Whether the first token would be late. Requests that only encode have none."""
        return not seq.encode_only and expected.late(self._target_s)

    def enter(self, seq: Sequence, expected: Expectation, steps_down: int) -> None:
        """Count a request until its first token or its end.

        steps_down: steps by which its detail was lowered.
        Raises Overloaded, with the figures, if the first token would be late.
        """
        if self.late(seq, expected) and not self._probes(expected):
            over = expected.seconds * expected.factor - self._target_s
            raise Overloaded(
                f"the first token would be later than the target of {self._target_s:g} s: {expected.reason}",
                retry_after=float(max(1, math.ceil(over))),
                # Ready requests are served first. If even they would be late, everyone is.
                scope="engine"
                if expected.cost.ready and expected.ahead.seconds > self._target_s
                else "request",
            )
        with self._lock:
            self.degraded += steps_down > 0
            self._in_a_row[expected.cost.ready] = 0
        self._first_tokens.enter(seq, seq.arrival, expected)

    def _probes(self, expected: Expectation) -> bool:
        """Count a refusal; or return that the request enters after all, so that its kind can be measured."""
        ready = expected.cost.ready
        with self._lock:
            if self._in_a_row[ready] >= PROBE and (expected.idle or expected.seconds <= self._target_s):
                return True
            self._in_a_row[ready] += 1
            self.refused += 1
            return False

    def leave(self, seq: Sequence) -> None:
        """Count a request no longer. Leaving twice is no error."""
        self._first_tokens.leave(seq.id)

    def stats(self) -> dict[str, float]:
        """Return the counters by the names of `observe.table`."""
        return {"requests_refused_late": self.refused, "requests_degraded_late": self.degraded}
