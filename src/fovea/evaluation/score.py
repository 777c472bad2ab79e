"""Scores answers as right or wrong, counts them per kind, and compares two models on the same questions.

An answer is right if it equals an accepted one, apart from case, white space and a final full stop or
exclamation mark, or if it is the same JSON value. Shares have Wilson's confidence interval.

The difference of two accuracies has Newcombe's interval for paired proportions (Statistics in Medicine 17,
1998, method 10), which combines Wilson's interval of each by their correlation. Its p value is that of
McNemar's exact test. Both are valid for small counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.evaluation.datasets import OTHER, Case

Z = 1.959963984540054
"""The quantile of the normal distribution for a two-sided 95% interval."""

SLICES: tuple[tuple[str, str, Callable[[Case], bool]], ...] = (
    ("counting up to 5", "counting", lambda case: case.facts.get("count", 99) <= 5),
    (
        "reading 4 characters at 20 px or more",
        "reading",
        lambda case: case.facts.get("characters") == 4 and case.facts.get("height", 0) >= 20,
    ),
)
"""Rows of the report for a part of a kind: name of the row, kind, and whether a case belongs to the part."""


@dataclass(frozen=True, slots=True)
class Result:
    """The answers to one case. Numbers of tokens are sums over its exchanges."""

    case: Case
    answers: tuple[str, ...]
    prompt_tokens: int
    image_tokens: int
    completion_tokens: int

    @property
    def correct(self) -> bool:
        """Whether every question of the case was answered right."""
        return len(self.answers) == len(self.case.exchanges) and all(
            matches(answer, exchange.accepted)
            for answer, exchange in zip(self.answers, self.case.exchanges, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Accuracy of one kind, or part of a kind.

    kind: name of the row.
    cases, correct: how many there are, and how many are right.
    low, high: 95% interval of the accuracy (Wilson).
    prompt_tokens, image_tokens, completion_tokens: means per case.
    """

    kind: str
    cases: int
    correct: int
    low: float
    high: float
    prompt_tokens: float
    image_tokens: float
    completion_tokens: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.cases if self.cases else 0.0


def matches(answer: str, accepted: Iterable[str]) -> bool:
    """Whether an answer equals one of the accepted answers, by the rules above."""
    text = _plain(answer)
    return any(text == _plain(right) or _same_json(answer, right) for right in accepted)


def wilson(correct: int, cases: int) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927), valid at 0%, at 100% and for small counts."""
    if cases == 0:
        return 0.0, 1.0
    share, square = correct / cases, Z * Z
    centre = (share + square / (2 * cases)) / (1 + square / cases)
    spread = Z * math.sqrt(share * (1 - share) / cases + square / (4 * cases * cases)) / (1 + square / cases)
    # Without min and max, rounding may put an end of the interval on the wrong side of the share, by one bit.
    return min(share, max(0.0, centre - spread)), max(share, min(1.0, centre + spread))


def report(results: Sequence[Result]) -> list[Row]:
    """Rows of the report: each kind in order of appearance, with its SLICES below it, and last all cases.

    If no case names a kind, there is only the last row.
    """
    rows = []
    kinds = list(dict.fromkeys(result.case.kind for result in results))
    for kind in kinds if kinds != [OTHER] else []:
        mine = [result for result in results if result.case.kind == kind]
        rows.append(_row(kind, mine))
        for name, whole, belongs in SLICES:
            part = [result for result in mine if whole == kind and belongs(result.case)]
            if part and len(part) < len(mine):
                rows.append(_row(name, part))
    rows.append(_row("all", results))
    return rows


def _row(kind: str, results: Sequence[Result]) -> Row:
    cases, correct = len(results), sum(result.correct for result in results)
    tokens = [(r.prompt_tokens, r.image_tokens, r.completion_tokens) for r in results]
    means = [sum(counts) / cases for counts in zip(*tokens, strict=True)] or [0.0] * 3
    return Row(kind, cases, correct, *wilson(correct, cases), *means)


def _plain(text: str) -> str:
    return " ".join(text.strip().lower().rstrip(".!").split())


def _same_json(answer: str, right: str) -> bool:
    if not right.lstrip().startswith(("{", "[")):
        return False
    try:
        return _equal_json(json.loads(answer), json.loads(right))
    except (ValueError, RecursionError):
        return False


def _equal_json(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON. There, unlike in Python, true is not equal to 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal_json, one, other))
    return bool(one == other)


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
