"""Expected durations of steps, learnt from all of them.

One estimate serves the pace, the bound on the batch, and admission. A step's duration is a linear function of
its composition (the formula of `simulate.cost`), fitted while the engine runs. It includes the time from the
end of the last step to the start of this one, because a client waits for both between two tokens. It does not
include the encoder, whose time is bounded by the clock (`execute.encode_queue`).
"""

from __future__ import annotations

import math

from fovea.engine.schedule.margin import Margin, Scatter
from fovea.engine.schedule.online_fit import Costs, OnlineFit
from fovea.planner.composition import Composition, pairs_of

PROPORTIONS = (10.0, 2.0, 0.01, 1.0, 10.0, 0.001)
"""Costs of a step, a decode, a token of its context, a token of a prompt, a chunk and a pair, relative to
each other, before the first measurement. Later nothing depends on them.
"""
FIRST_MARGIN = 1.25
"""Factor between prediction and bound before the first measurement."""


class StepTimes:
    """Predicts durations of steps, and the bound that a percentage of them keeps.

    margin: factor from prediction to bound. Only steps with decodes count, because others delay no stream.
    """

    def __init__(
        self, percentile: float = 95, costs: Costs | None = None, margin: Scatter | None = None
    ) -> None:
        """Create predictions.

        percentile: percentage of the steps with decodes that should keep the bound.
        costs, margin: known ones, for simulations; None: they are learnt.
        """
        self.margin: Scatter = margin or Margin(percentile, first=FIRST_MARGIN)
        self._fit: Costs = costs or OnlineFit(PROPORTIONS)

    @property
    def measured(self) -> bool:
        """Whether there was a measurement. Before it, predictions have no scale."""
        return self._fit.measured

    def seconds(self, composition: Composition) -> float:
        """Return the expected seconds of a step; 0 for a step without tokens."""
        return self._fit.predict(composition.amounts) if composition else 0.0

    def prompt_s(self, start: int, count: int) -> float:
        """Return the expected seconds that a chunk adds to a step.

        start: number of tokens of the sequence that are computed already.
        count: tokens of the chunk.
        """
        _, _, _, token, chunk, pair = self._fit.costs
        return chunk + count * token + pairs_of(start, count) * pair

    def prompt_tokens(self, start: int, seconds: float) -> float:
        """Return the number of tokens of the longest chunk that adds at most these seconds; may be infinite.

        start: number of tokens of the sequence that are computed already.
        """
        _, _, _, token, chunk, pair = self._fit.costs
        rest = seconds - chunk
        if rest <= 0:
            return 0
        # count * token + (count * start + count * (count + 1) / 2) * pair = rest, solved for count
        linear, square = token + (start + 0.5) * pair, pair / 2
        if not linear:
            return math.inf
        return math.floor(2 * rest / (linear + math.sqrt(linear * linear + 4 * square * rest)))

    def decode_s(self, context: float) -> float:
        """Return the expected seconds that one more decode adds. context: tokens that it attends to."""
        return self._fit.costs[1] + context * self._fit.costs[2]

    def observe(self, composition: Composition, seconds: float) -> None:
        """Learn from a step. seconds: its duration without the encoder, with the time since the last step."""
        if not composition:
            return
        if composition.decodes and self.measured:
            self.margin.observe(self.seconds(composition), seconds)
        self._fit.observe(composition.amounts, seconds)
