"""Compares two models or settings on the same questions, by the questions on which they differ.

The difference of two accuracies has Newcombe's interval for paired proportions (Statistics in Medicine 17,
1998, method 10), which combines Wilson's interval of each by their correlation. Its p value is that of
McNemar's exact test. Both are valid for small counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fovea.evaluation.score import wilson


@dataclass(frozen=True, slots=True)
class PairedCounts:
    """Counts of questions, by which of two settings answered them right. There is at least one question.

    both: both were right.
    only_first: only the first was right.
    only_second: only the second was right.
    neither: none was right.
    """

    both: int
    only_first: int
    only_second: int
    neither: int

    @classmethod
    def from_answers(cls, first: Sequence[bool], second: Sequence[bool]) -> PairedCounts:
        """Count two sequences of answers: for each question, whether it was answered right.

        Raises ValueError if the lengths differ or are 0.
        """
        if len(first) != len(second) or not first:
            raise ValueError(
                f"{len(first)} and {len(second)} answers are not pairs; accepted: equal numbers, at least 1"
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
        """Accuracy of the first minus accuracy of the second, in [-1, 1]."""
        return (self.only_first - self.only_second) / self.cases

    @property
    def interval(self) -> tuple[float, float]:
        """Low and high end of the 95% interval of the difference."""
        one, other = (self.both + right for right in (self.only_first, self.only_second))
        low, high = wilson(one, self.cases)
        below, above = one / self.cases - low, high - one / self.cases
        low, high = wilson(other, self.cases)
        other_below, other_above = other / self.cases - low, high - other / self.cases
        correlation = self._correlation()
        down = math.sqrt(max(0.0, below**2 - 2 * correlation * below * other_above + other_above**2))
        up = math.sqrt(max(0.0, above**2 - 2 * correlation * above * other_below + other_below**2))
        return max(-1.0, self.difference - down), min(1.0, self.difference + up)

    @property
    def p_value(self) -> float:
        """The two-sided p value of McNemar's exact test.

        It is the probability of a difference at least as large between two settings that are equally good.
        """
        count = self.only_first + self.only_second
        tail = sum(math.comb(count, k) for k in range(min(self.only_first, self.only_second) + 1))
        return min(1.0, 2 * tail / (1 << count))

    @property
    def better(self) -> bool:
        """Whether the first is better, with the whole interval above 0."""
        return self.interval[0] > 0

    @property
    def worse(self) -> bool:
        """Whether the first is worse, with the whole interval below 0."""
        return self.interval[1] < 0

    def _correlation(self) -> float:
        """Correlation of the two, with Newcombe's continuity correction: a small positive one becomes 0."""
        margins = (
            (self.both + self.only_first) * (self.only_second + self.neither)
            * (self.both + self.only_second) * (self.only_first + self.neither)
        )  # fmt: skip
        product = self.both * self.neither - self.only_first * self.only_second
        if not margins:
            return 0.0
        corrected = max(product - self.cases / 2, 0.0) if product > 0 else product
        return corrected / math.sqrt(margins)
