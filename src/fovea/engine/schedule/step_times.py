"""Expected durations of steps and of encoded images, learnt while the engine runs.

One estimate serves the ITL limit, the bound on the batch, and admission. A step's duration is a linear
function of its composition (the formula of `planner.cost`). It includes the time from the end of the last
step to the start of this one, because a client waits for both between two tokens. It does not include the
encoder, whose time is bounded by the clock (`execute.encode_queue`).

`OnlineFit` learns the costs, `Margin` by which factor durations exceed their predictions.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from operator import mul
from typing import Protocol

from fovea.planner.cost import Composition, pairs_of

MEMORY = 500
"""A measurement has lost two thirds of its weight after this many further ones."""
MOST_EXCESS = 2.0
"""Longest duration that a measurement may have, as a multiple of the expected one."""
DAMPING = 1.0
"""Weight of the present value of a cost: that of as many measurements that consist of this cost alone."""
LARGEST_WEIGHT = 1e100
"""The sums are scaled down when the weight of a new measurement has grown to this number."""
WINDOW = 256
"""Number of latest ratios."""
STEP_PROPORTIONS = (10.0, 2.0, 0.01, 1.0, 10.0, 0.001)
"""Costs of a step, a decode, a token of its context, a token of a prompt, a chunk and a pair, relative to
each other, before the first measurement. Later nothing depends on them.
"""
FIRST_MARGIN = 1.25
"""Factor between prediction and bound before the first measurement."""
IMAGE_PROPORTIONS = (1.0, 1.0, 0.002)
"""Costs of an image, of a row and of a pair of rows, relative to each other, before the first image."""
IMAGE_MEMORY = 100
"""Number of images after which an older one has lost two thirds of its weight."""


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
        self._fit: Costs = costs or OnlineFit(STEP_PROPORTIONS)

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

    @property
    def chunk_s(self) -> float:
        """Expected fixed seconds of a chunk."""
        return self._fit.costs[4]

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


class ImageTimes:
    """Predicts the seconds of the encoder for an image.

    seconds = image_s + v * visual_s + v^2 * visual_pair_s          (v rows of encoder output)
    """

    def __init__(self, costs: Costs | None = None) -> None:
        """costs: known ones, for simulations; None: they are learnt."""
        self._fit: Costs = costs or OnlineFit(IMAGE_PROPORTIONS, IMAGE_MEMORY)

    def seconds(self, rows: int) -> float:
        """Return the expected seconds for an image with these rows; 0 before the first image."""
        return self._fit.predict((1, rows, rows * rows)) if self._fit.measured else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from an encoded image. seconds: time of the encoder."""
        self._fit.observe((1, rows, rows * rows), seconds)


class Costs(Protocol):
    """Seconds per unit of several amounts. `OnlineFit` learns them; an oracle knows them.

    measured, costs: as in `OnlineFit`.
    """

    measured: bool
    costs: list[float]

    def predict(self, amounts: Sequence[float]) -> float:
        """Return the expected seconds for these amounts."""
        ...

    def observe(self, amounts: Sequence[float], seconds: float) -> None:
        """Learn from one duration."""
        ...


class OnlineFit:
    """Costs of several amounts, learnt from measured durations. It costs some microseconds per measurement.

        seconds = amounts[0] * costs[0] + amounts[1] * costs[1] + ...

    After each measurement the costs move towards the least squares of relative errors over the latest
    measurements. Three things make that safe on a running engine:

    - A measurement counts as at most MOST_EXCESS times what was expected. One stall of the machine thus has
      little weight, while a machine that has become slower is followed within some tens of measurements.
    - Each cost is damped towards its present value. A cost that the latest measurements say nothing about,
      such as that of prompts while only decodes run, stays as it is.
    - Before the first measurement only the proportions of the costs are assumed. It sets their common scale.

    Method: weighted least squares with exponential forgetting, solved by coordinate descent with a bound
    at zero. One pass over the amounts of a measurement is made per measurement.

    costs: seconds per unit of each amount; not below 0.
    measured: whether there was a measurement. Before it, the costs have no scale.
    """

    def __init__(self, proportions: Sequence[float], memory: int = MEMORY) -> None:
        """Create a fit without measurements.

        proportions: the costs relative to each other before anything is known; above 0.
        memory: number of measurements after which an old one has lost two thirds of its weight.
        """
        size = len(proportions)
        self.costs = list(proportions)
        self.measured = False
        self._scales = list(proportions)
        self._growth = 1 / (1 - 1 / memory)
        self._weight = 1.0
        self._products = [[0.0] * size for _ in range(size)]
        self._goals = [0.0] * size

    def predict(self, amounts: Sequence[float]) -> float:
        """Return the expected seconds."""
        return float(sum(map(mul, self.costs, amounts)))

    def observe(self, amounts: Sequence[float], seconds: float) -> None:
        """Learn from one duration. amounts: at least one is above 0. seconds: 0 counts as a nanosecond."""
        seconds = max(seconds, 1e-9)
        if not self.measured:
            scale = seconds / self.predict(amounts)
            self.costs = [scale * cost for cost in self.costs]
            self._scales = list(self.costs)
            self.measured = True
        expected = max(self.predict(amounts), 1e-9)
        row = [(place, amount / expected) for place, amount in enumerate(amounts) if amount]
        share = min(seconds / expected, MOST_EXCESS)
        self._add(row, share)
        for place, _ in row:
            self.costs[place] = self._best(place)

    def _add(self, row: list[tuple[int, float]], share: float) -> None:
        """Add a measurement to the sums. It weighs more than the last one, which amounts to forgetting."""
        self._weight *= self._growth
        if self._weight > LARGEST_WEIGHT:
            self._products = [[value / self._weight for value in line] for line in self._products]
            self._goals = [value / self._weight for value in self._goals]
            self._weight = 1.0
        for place, amount in row:
            weighted = self._weight * amount
            self._goals[place] += weighted * share
            line = self._products[place]
            for other, value in row:
                line[other] += weighted * value

    def _best(self, place: int) -> float:
        """Return the best value of one cost while the others stay, but not below 0."""
        line, cost = self._products[place], self.costs[place]
        damping = DAMPING * self._weight / max(cost, self._scales[place]) ** 2
        others = float(sum(map(mul, line, self.costs))) - line[place] * cost
        return max(0.0, (self._goals[place] - others + damping * cost) / (line[place] + damping))


class Scatter(Protocol):
    """The factor from an expected duration to a percentile of it."""

    @property
    def percentile(self) -> float: ...

    @property
    def factor(self) -> float: ...

    def observe(self, predicted: float, measured: float) -> None:
        """Learn from one duration."""
        ...


class Margin:
    """The factor that turns a prediction into a bound that a given percentage of durations keeps.

    The ratio of measured to predicted seconds is kept for the latest WINDOW predictions. A prediction,
    multiplied by the quantile at a percentile, is exceeded by the remaining share, whatever the
    distribution of the errors is, as long as the next error is like the latest ones. The quantile is
    taken one rank higher than usual, as split conformal prediction does (Lei, G'Sell, Rinaldo,
    Tibshirani, Wasserman, 2018), which makes this exact for small windows, too.

    One thread observes; others may read the factor meanwhile.

    factor: the ratio that the percentage of the latest durations did not exceed; the largest while few.
    """

    def __init__(self, percentile: float, window: int = WINDOW, first: float = 1.0) -> None:
        """Create a margin without ratios.

        percentile: percentage of the durations that should stay within the bound, below 100.
        window: number of latest ratios that count.
        first: the factor before the first ratio.
        """
        self.percentile = percentile
        self.factor = first
        self._latest: deque[float] = deque(maxlen=window)
        self._sorted: list[float] = []

    def observe(self, predicted: float, measured: float) -> None:
        """Record a duration. predicted: seconds that were expected; 0 is not recorded."""
        if predicted <= 0:
            return
        if len(self._latest) == self._latest.maxlen:
            del self._sorted[bisect_left(self._sorted, self._latest[0])]
        self._latest.append(measured / predicted)
        insort(self._sorted, measured / predicted)
        count = len(self._sorted)
        rank = math.ceil((count + 1) * self.percentile / 100)
        self.factor = self._sorted[min(rank, count) - 1]
