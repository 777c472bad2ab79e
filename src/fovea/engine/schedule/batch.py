"""The number of sequences that may run at once, so that gaps between tokens stay within a target.

`DecodeBound` predicts the decodes of all running sequences, with the length that their contexts will have. A
sequence joins only while the prediction stays below the target, so no step has to be too long first.
`BatchRule` is a simple rule, used for comparison. It waits until steps have been too long, and shrinks the
batch also when a long prompt or an image made them long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Protocol

from fovea.engine.schedule.step_times import StepTimes
from fovea.engine.sequence import Sequence
from fovea.planner.composition import Composition

WINDOW = 10
"""Number of latest steps whose mean `BatchRule` uses."""
HIGH, LOW = 1.2, 0.8
"""Shares of the target: `BatchRule` shrinks above HIGH and grows below LOW."""
CHANGE = 2
"""Number of sequences that `BatchRule` adds or removes at once."""
MOST_GROWTH = 128
"""Most tokens by which a context is expected to grow on average; limits of answers are often far off."""
SAMPLE = 8
"""Number of waiting sequences whose mean length stands for those that join next."""


class BatchControl(Protocol):
    """A rule that bounds the number of running sequences."""

    def allowed(self, running: Seq[Sequence], waiting: Seq[Sequence], beside_s: float) -> int:
        """How many sequences may run now. Sequences above that number that run already continue.

        beside_s: seconds of the smallest amounts of prompts and images that a step can compute.
        """
        ...

    def observe(self, seconds: float) -> None:
        """Record the duration of a step with decodes, in seconds."""
        ...


class DecodeBound:
    """Bound the batch so that a step stays within the target when all running sequences decode.

    Beside the decodes the step must have time for the smallest chunk of a prompt and slice of an image,
    unless that time is missing even for one sequence. If the target cannot hold for one sequence alone, there
    is no bound.

    target_s: longest gap between tokens in seconds; 0 for no bound.
    maximum: most sequences.
    times: predicts durations.
    """

    def __init__(self, target_s: float, maximum: int, times: StepTimes) -> None:
        self.target_s = target_s
        self.maximum = maximum
        self.times = times

    def allowed(self, running: Seq[Sequence], waiting: Seq[Sequence], beside_s: float) -> int:
        if not self.target_s or not self.times.measured:
            return self.maximum
        lengths = [_expected_length(seq) for seq in running]
        others = [_expected_length(seq) for seq in islice(waiting, SAMPLE)] or lengths
        mean = sum(others) / max(1, len(others))
        bound = self.target_s / self.times.margin.factor
        free = bound - self.times.seconds(Composition(1, int(mean)))
        if free < 0:
            return self.maximum
        free = bound - (beside_s if beside_s <= free else 0.0)
        free -= self.times.seconds(Composition(len(running), int(sum(lengths))) or Composition(1))
        more = free / max(self.times.decode_s(mean), 1e-9)
        return max(1, min(self.maximum, len(running) + int(more // 1)))

    def observe(self, seconds: float) -> None:
        """Nothing to learn here: `times` has the step already."""


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

    def allowed(self, running: Seq[Sequence] = (), waiting: Seq[Sequence] = (), beside_s: float = 0.0) -> int:
        return self._allowed

    def observe(self, seconds: float) -> None:
        self._latest.append(seconds)
        mean = sum(self._latest) / len(self._latest)
        if mean > HIGH * self.target_s:
            self._allowed = max(1, self._allowed - CHANGE)
        elif mean < LOW * self.target_s:
            self._allowed = min(self.maximum, self._allowed + CHANGE)


def _expected_length(seq: Sequence) -> float:
    """Return the length of a sequence half way through the rest of its answer."""
    rest = seq.max_tokens - len(seq.output_ids)
    return seq.length + min(rest / 2, MOST_GROWTH)
