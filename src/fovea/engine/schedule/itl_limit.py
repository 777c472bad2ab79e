"""The ITL limit: how much a step may do beside its decodes, so that running streams keep their rhythm.

The budget of a step is time. Its decodes alone take a predicted time (`step_times`). A step that also
computes part of a prompt or encodes part of an image may last `pace` times as long, or as long as the target
for gaps allows. The rest of that time goes to prompts, or half of it while an image is being encoded. The
encoder gets the time that prompts leave, because it can stop after any slice.

With a target the bound is not the target itself: durations scatter, and half of the steps that are predicted
to take exactly the target take longer. The predicted time, multiplied by a measured margin, has to fit into
the target. The margin is the ratio that the percentage of steps in `target_percentile` does not exceed.

If the smallest chunk or slice does not fit beside the decodes, prompts and images advance only in as many
steps as may be late by the percentile (`LateSteps`). If even a single decode alone misses the target, the
target cannot hold, whatever is computed. Then it is ignored, and only `pace` bounds a step.

When many requests wait for their first token and few streams decode, the bound of `pace` grows with the
number of waiting requests beyond the first. To delay one stream for the sake of seven requests does less
harm, and afterwards all of them decode in a batch at about the cost of one. A target still holds.

Without decodes no stream waits for a token. Such a step is still limited, so that new requests are scheduled
soon.

`BatchRule` and `DecodeBound` limit the number of sequences that run at once, for the same target.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from fovea.engine.schedule.step_times import StepTimes
from fovea.engine.sequence import Sequence
from fovea.planner.cost import Composition

FEWEST_TOKENS = 16
"""The smallest chunk: below it, the fixed cost of a step dominates."""
LOWEST = -10.0
"""Lowest credit, so that after a bad minute of the machine only the next steps have to make up for it."""
IDLE_STEP_S = 0.2
"""Longest step without decodes, in seconds; twice that for prompts: short chunks take longer in all."""
FIRST_TOKENS = 128
"""Tokens of prompts in the first step, which tells the speed of the machine."""
FREE_BATCH = 4
"""This many sequences decode at about the cost of one."""
CROWDING = 0.5
"""Exponent below 1: the bound grows more slowly than the number of waiting requests."""
LATE_STEP = 2.0
"""Length of a step that may be late, as a multiple of the target."""
WINDOW = 10
"""Number of latest steps whose mean `BatchRule` uses."""
HIGH, LOW = 1.2, 0.8
"""Fractions of the target: `BatchRule` shrinks above HIGH and grows below LOW."""
CHANGE = 2
"""Number of sequences that `BatchRule` adds or removes at once."""
MOST_GROWTH = 128
"""Most tokens by which a context is expected to grow on average; limits of answers are often far off."""
SAMPLE = 8
"""Number of waiting sequences whose mean length stands for those that join next."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The decision about the length of one step.

    seconds: predicted seconds that the step may take, encoder included; infinite for no bound.
    alone: predicted seconds of its decodes alone.
    factor: durations are expected to stay below this multiple of the prediction.
    forced: prompts and images advance by the smallest amount even if it takes longer.
    reason: the bound that decided, in words.
    """

    seconds: float
    alone: float
    factor: float
    forced: bool
    reason: str

    @property
    def spare_s(self) -> float:
        """Predicted seconds beside the decodes; not below 0."""
        return max(0.0, self.seconds - self.alone)


class ItlLimit:
    """Bounds the length of steps by predictions of their duration."""

    def __init__(self, pace: float, target_s: float, max_tokens: int, times: StepTimes) -> None:
        """pace: longest step, as a multiple of the time of its decodes alone; 0 for no bound.
        target_s: longest gap between tokens in seconds; 0 for no bound.
        max_tokens: most prompt tokens of a step.
        times: predicts durations.
        """
        self.pace = pace
        self.target_s = target_s
        self.max_tokens = max_tokens
        self.times = times
        self.late_steps = LateSteps(times.margin.percentile)

    def smallest_s(self, slice_s: float) -> float:
        """Return the seconds of the smallest amounts of prompts and images that a step can compute.

        slice_s: seconds of a slice of an image.
        """
        return max(self.times.prompt_s(0, FEWEST_TOKENS), slice_s)

    def allow(self, decodes: Composition, streams: int, others: int, slice_s: float = 0.0) -> Allowance:
        """Decide how long the next step may take.

        decodes: composition of a step that only decodes.
        streams: number of decodes whose rhythm counts.
        others: number of requests that wait for their first token.
        slice_s: seconds of a slice of an image that is to be encoded; 0: none is.
        """
        if not streams:
            return Allowance(IDLE_STEP_S, 0.0, 1.0, True, "no stream to protect")
        if not self.times.measured:
            return Allowance(self.target_s or IDLE_STEP_S, 0.0, 1.0, True, "nothing is measured")
        alone, factor = self.times.seconds(decodes), self.times.margin.factor
        crowd = max(1.0, (others - 1) / max(1.0, streams / FREE_BATCH))
        paced = self.pace * math.pow(crowd, CROWDING) * alone if self.pace else math.inf
        bound = self.target_s / factor if self.target_s else math.inf
        if paced <= bound or not self.possible(decodes):
            return Allowance(paced, alone, 1.0, True, "pace")
        if bound - alone < self.smallest_s(slice_s) and self.late_steps.may_be_late:
            return Allowance(min(paced, LATE_STEP * bound), alone, factor, True, "target, may be late")
        return Allowance(bound, alone, factor, False, "target")

    def possible(self, decodes: Composition) -> bool:
        """Whether the target can hold: a step that decodes one of these sequences keeps it."""
        if not self.target_s or not self.times.measured:
            return True
        return self.times.seconds(decodes.mean) * self.times.margin.factor <= self.target_s

    def prompt_budget(self, allowance: Allowance, *, encoding: bool) -> PromptBudget:
        """Return the budget for prompts. encoding: an image is to be encoded in the same step."""
        if not self.times.measured:
            return PromptBudget(min(self.max_tokens, FIRST_TOKENS))
        seconds = allowance.spare_s
        if not allowance.alone:
            seconds = 2 * IDLE_STEP_S
        elif encoding and seconds / 2 >= self.times.prompt_s(0, FEWEST_TOKENS):
            seconds /= 2
        return PromptBudget(self.max_tokens, PromptTime(seconds, self.times, allowance.forced))

    def encode_s(self, allowance: Allowance, step: Composition) -> float:
        """Return the seconds for the encoder beside the tokens of a step; 0 if there is no time left.

        step: composition of the whole step.
        """
        if allowance.seconds == math.inf:
            return math.inf
        tokens = self.times.seconds(step) if self.times.measured else 0.0
        return max(0.0, allowance.factor * (allowance.seconds - tokens))


class PromptTime(NamedTuple):
    """Seconds for the prompts of a step.

    seconds: sum of the seconds of all chunks.
    times: tells the seconds of a chunk.
    forced: the first chunk has FEWEST_TOKENS even if they take longer, so that prompts advance.
    """

    seconds: float
    times: StepTimes
    forced: bool = True


class PromptBudget:
    """The tokens and seconds that are left for prompts while the step is planned.

    tokens: tokens of prompts that can still be computed.
    """

    def __init__(self, tokens: int, time: PromptTime | None = None) -> None:
        """tokens: most tokens of prompts. time: bounds their seconds; None: tokens are the only bound."""
        self.tokens = tokens
        self._time = time
        self._seconds = math.inf if time is None else time.seconds
        self._fewest = FEWEST_TOKENS if time is not None and time.forced else 0
        self._reserved, self._before = (0, 0.0), 0.0

    def reserve_half(self) -> bool:
        """Set half of the budget aside. Returns False, and sets nothing aside, if half holds no chunk."""
        seconds = 0.0 if self._seconds == math.inf else self._seconds / 2
        fitting = self._time.times.prompt_tokens(0, seconds) if self._time and seconds else math.inf
        if min(fitting, self.tokens // 2) < FEWEST_TOKENS:
            return False
        self._reserved = self.tokens // 2, seconds
        self.tokens -= self._reserved[0]
        self._seconds -= seconds
        self._before = self._seconds
        return True

    def return_half(self, *, short: bool) -> None:
        """Give back what was set aside.

        short: the step shall end soon, because a client waits for its first token. So only as much time is
            left as was taken since `reserve_half`, and that of the smallest chunk.
        """
        taken = self._before - self._seconds
        self.tokens += self._reserved[0]
        self._seconds += self._reserved[1]
        if short and self._time is not None and self._time.forced and self._seconds < math.inf:
            self._seconds = min(self._seconds, taken)
            self._fewest = FEWEST_TOKENS

    def most(self, start: int, wanted: int) -> int:
        """Return the most tokens that a sequence may compute; fewer than FEWEST_TOKENS only at its end.

        start: number of its computed tokens. wanted: number of its missing ones, at least 1.
        """
        if self._time is None or self._seconds == math.inf:
            return max(0, self.tokens)  # a whole image may have taken more than there was
        fitting = max(self._time.times.prompt_tokens(start, self._seconds), self._fewest)
        return int(max(0, min(self.tokens, fitting))) if fitting >= min(wanted, FEWEST_TOKENS) else 0

    def take(self, start: int, count: int) -> None:
        """Count a chunk. start: computed tokens of its sequence. count: tokens of the chunk."""
        self.tokens -= count
        self._fewest = max(0, self._fewest - count)
        if self._time is not None:
            self._seconds -= self._time.times.prompt_s(start, count)


class LateSteps:
    """A credit of late steps: a percentile of 95 earns one of them every 20 steps.

    It is spent by steps that take longer than the target for whatever reason. At most one late step is saved
    up, so late steps never follow each other.

    steps, late: number of steps with decodes since the start, and how many of them were late.
    """

    def __init__(self, percentile: float) -> None:
        """percentile: percentage of steps that should keep the target."""
        self.steps = 0
        self.late = 0
        self._share = 1 - percentile / 100
        self._credit = 0.0

    @property
    def may_be_late(self) -> bool:
        """Whether the next step may be late."""
        return self._credit >= 1

    def observe(self, late: bool) -> None:
        """Record a step with decodes. late: whether it took longer than the target."""
        self.steps += 1
        self.late += late
        self._credit = max(LOWEST, min(1.0, self._credit + self._share - late))


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
        """Do nothing: `times` has the step already."""


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
