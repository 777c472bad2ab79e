"""Right or wrong, counted per kind, with the interval that the count allows.

An answer is right when it equals an accepted one up to case, white space and a final stop, or is the same JSON value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.evaluation.datasets import OTHER, Case

Z = 1.959963984540054
"""The normal quantile of a two-sided 95% interval."""

SLICES: tuple[tuple[str, str, Callable[[Case], bool]], ...] = (
    ("counting up to 5", "counting", lambda case: case.facts.get("count", 99) <= 5),
    (
        "reading 4 characters at 20 px or more",
        "reading",
        lambda case: case.facts.get("characters") == 4 and case.facts.get("height", 0) >= 20,
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One case, answered. Tokens are summed over its exchanges."""

    case: Case
    answers: tuple[str, ...]
    prompt_tokens: int
    image_tokens: int
    completion_tokens: int

    @property
    def correct(self) -> bool:
        return len(self.answers) == len(self.case.exchanges) and all(
            matches(answer, exchange.accepted)
            for answer, exchange in zip(self.answers, self.case.exchanges, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Accuracy of one kind with its 95% Wilson interval; mean tokens per case."""

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
    said = _plain(answer)
    return any(said == _plain(right) or _same_json(answer, right) for right in accepted)


def wilson(correct: int, cases: int) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927); honest at 0%, 100% and small counts."""
    if cases == 0:
        return 0.0, 1.0
    share, square = correct / cases, Z * Z
    centre = (share + square / (2 * cases)) / (1 + square / cases)
    spread = Z * math.sqrt(share * (1 - share) / cases + square / (4 * cases * cases)) / (1 + square / cases)
    # Rounding alone may put an end of the interval past a share of 0 or 1, by the last bit.
    return min(share, max(0.0, centre - spread)), max(share, min(1.0, centre + spread))


def report(results: Sequence[Result]) -> list[Row]:
    """A row per kind in order of appearance, its slices below it, and all together last; cases without kinds need
    no row but the last."""
    rows = []
    kinds = list(dict.fromkeys(result.case.kind for result in results))
    for kind in kinds if kinds != [OTHER] else []:
        mine = [result for result in results if result.case.kind == kind]
        rows.append(_row(kind, mine))
        for name, of, chosen in SLICES:
            part = [result for result in mine if of == kind and chosen(result.case)]
            if part and len(part) < len(mine):
                rows.append(_row(name, part))
    rows.append(_row("all", results))
    return rows


def _row(kind: str, results: Sequence[Result]) -> Row:
    cases, correct = len(results), sum(result.correct for result in results)
    low, high = wilson(correct, cases)
    return Row(
        kind,
        cases,
        correct,
        low,
        high,
        _mean([result.prompt_tokens for result in results]),
        _mean([result.image_tokens for result in results]),
        _mean([result.completion_tokens for result in results]),
    )


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _plain(text: str) -> str:
    return " ".join(text.strip().lower().rstrip(".!").split())


def _same_json(answer: str, right: str) -> bool:
    if not right.lstrip().startswith(("{", "[")):
        return False
    try:
        return _alike(json.loads(answer), json.loads(right))
    except (ValueError, RecursionError):
        return False


def _alike(one: Any, other: Any) -> bool:
    """Equal as JSON, where true is not 1, as it is in Python."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)
