"""The pace: how much a step may do beside its decodes, so that running streams keep their rhythm.

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
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fovea.engine.schedule.late_steps import LateSteps
from fovea.engine.schedule.prompt_room import FEWEST_TOKENS, PromptRoom, PromptTime
from fovea.engine.schedule.step_times import StepTimes
from fovea.planner.composition import Composition

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


class Pace:
    """Bounds the length of steps by predictions of their duration."""

    def __init__(self, pace: float, target_s: float, max_tokens: int, times: StepTimes) -> None:
        """Create a pace.

        pace: longest step, as a multiple of the time of its decodes alone; 0 for no bound.
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

    def prompt_room(self, allowance: Allowance, *, encoding: bool) -> PromptRoom:
        """Return the room for prompts. encoding: an image is to be encoded in the same step."""
        if not self.times.measured:
            return PromptRoom(min(self.max_tokens, FIRST_TOKENS))
        seconds = allowance.spare_s
        if not allowance.alone:
            seconds = 2 * IDLE_STEP_S
        elif encoding and seconds / 2 >= self.times.prompt_s(0, FEWEST_TOKENS):
            seconds /= 2
        return PromptRoom(self.max_tokens, PromptTime(seconds, self.times, allowance.forced))

    def encode_s(self, allowance: Allowance, step: Composition) -> float:
        """Return the seconds for the encoder beside the tokens of a step; 0 if there is no time left.

        step: composition of the whole step.
        """
        if allowance.seconds == math.inf:
            return math.inf
        tokens = self.times.seconds(step) if self.times.measured else 0.0
        return max(0.0, allowance.factor * (allowance.seconds - tokens))
