"""Two ways to answer the same questions, compared by the questions on which they differ.

Differences of accuracies have Newcombe's interval for paired proportions (Statistics in Medicine 17, 1998, method 10: Wilson's
intervals of both, put together by their correlation), and the exact test of McNemar. Both hold at small counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fovea.evaluation.score import wilson


@dataclass(frozen=True, slots=True)
class Paired:
    """Questions that both answered right, only the first, only the second, neither. One question at least."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @classmethod
    def of(cls, first: Sequence[bool], second: Sequence[bool]) -> Paired:
        """Right or wrong, question by question. Raises ValueError unless they are as many, and some."""
        if len(first) != len(second) or not first:
            raise ValueError(
                f"{len(first)} and {len(second)} answers are no pairs; accepted: as many, and some"
            )
        pairs = [(bool(one), bool(other)) for one, other in zip(first, second, strict=True)]
        right, wrong = True, False
        return cls(
            pairs.count((right, right)), pairs.count((right, wrong)),
            pairs.count((wrong, right)), pairs.count((wrong, wrong)),
        )  # fmt: skip

    @property
    def cases(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        """Accuracy of the first less that of the second."""
        return (self.only_first - self.only_second) / self.cases

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the difference."""
        one, other = (self.both + right for right in (self.only_first, self.only_second))
        low, high = wilson(one, self.cases)
        below, above = one / self.cases - low, high - one / self.cases
        low, high = wilson(other, self.cases)
        other_below, other_above = other / self.cases - low, high - other / self.cases
        alike = self._correlation()
        down = math.sqrt(max(0.0, below**2 - 2 * alike * below * other_above + other_above**2))
        up = math.sqrt(max(0.0, above**2 - 2 * alike * above * other_below + other_below**2))
        return max(-1.0, self.difference - down), min(1.0, self.difference + up)

    @property
    def chance(self) -> float:
        """p of McNemar's exact test, two-sided: how often equal ways would differ so much or more."""
        count = self.only_first + self.only_second
        tail = sum(math.comb(count, k) for k in range(min(self.only_first, self.only_second) + 1))
        return min(1.0, 2 * tail / (1 << count))

    @property
    def better(self) -> bool:
        """The first answers more of them, by more than the interval."""
        return self.interval[0] > 0

    @property
    def worse(self) -> bool:
        return self.interval[1] < 0

    def _correlation(self) -> float:
        """Of the two, with Newcombe's correction for continuity: a small positive one counts as none."""
        margins = (
            (self.both + self.only_first) * (self.only_second + self.neither)
            * (self.both + self.only_second) * (self.only_first + self.neither)
        )  # fmt: skip
        product = self.both * self.neither - self.only_first * self.only_second
        if not margins:
            return 0.0
        corrected = max(product - self.cases / 2, 0.0) if product > 0 else product
        return corrected / math.sqrt(margins)
