"""A control that knows what the engine has to learn: the yardstick for the engine's own predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from fovea.engine.schedule.image_times import ImageTimes
from fovea.engine.schedule.step_times import StepTimes
from fovea.engine.simulate.noise import Noise, NoiseSettings
from fovea.planner.cost import CostModel

DRAWS = 20_000
"""Number of disturbances from which their percentile is taken."""


class KnownCosts:
    """Costs that do not change. It implements `schedule.online_fit.Costs`."""

    measured = True

    def __init__(self, *costs: float) -> None:
        self.costs = list(costs)

    def predict(self, amounts: Sequence[float]) -> float:
        return float(sum(map(mul, self.costs, amounts)))

    def observe(self, amounts: Sequence[float], seconds: float) -> None:
        """There is nothing to learn."""


@dataclass(frozen=True, slots=True)
class KnownScatter:
    """The percentile of the disturbances. It implements `schedule.margin.Scatter`."""

    percentile: float
    factor: float

    def observe(self, predicted: float, measured: float) -> None:
        """There is nothing to learn."""


@dataclass(frozen=True, slots=True)
class Oracle:
    """Knows the costs of steps and the size of their disturbances.

    noise: the disturbances.
    first_factor: fixed factor from expected to bounded first tokens; None: it is learnt.
    """

    noise: NoiseSettings
    first_factor: float | None = None

    def times(self, cost: CostModel, percentile: float) -> StepTimes:
        """Return predictions that need no measurement."""
        disturb, draws = Noise(self.noise).disturb, DRAWS
        factors = sorted(disturb(1.0) for _ in range(draws))
        factor = factors[min(draws - 1, math.ceil(draws * percentile / 100))]
        costs = KnownCosts(
            cost.step_s + cost.between_s,
            cost.decode_s,
            cost.context_s,
            cost.token_s,
            cost.chunk_s,
            cost.pair_s,
        )
        return StepTimes(percentile, costs, KnownScatter(percentile, factor))

    def images(self, cost: CostModel) -> ImageTimes:
        """Return predictions of the encoder that need no measurement."""
        return ImageTimes(KnownCosts(cost.image_s, cost.visual_s, cost.visual_pair_s))
