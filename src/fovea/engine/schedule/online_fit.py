"""A linear model of durations that is fitted while it is used, with no cost below zero.

    seconds = amounts[0] * costs[0] + amounts[1] * costs[1] + ...

After each measurement the costs move towards the least squares of relative errors over the latest
measurements. Three things make that safe on a running engine:

- A measurement counts as at most MOST_EXCESS times what was expected. One stall of the machine thus has
  little weight, while a machine that has become slower is followed within some tens of measurements.
- Each cost is damped towards its present value. A cost that the latest measurements say nothing about, such
  as that of prompts while only decodes run, stays as it is.
- Before the first measurement only the proportions of the costs are assumed. It sets their common scale.

Method: weighted least squares with exponential forgetting, solved by coordinate descent with a bound at zero.
One pass over the amounts of a measurement is made per measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Protocol

MEMORY = 500
"""A measurement has lost two thirds of its weight after this many further ones."""
MOST_EXCESS = 2.0
"""Longest duration that a measurement may have, as a multiple of the expected one."""
DAMPING = 1.0
"""Weight of the present value of a cost: that of as many measurements that consist of this cost alone."""
LARGEST_WEIGHT = 1e100
"""The sums are scaled down when the weight of a new measurement has grown to this number."""


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
