"""Divides a total of visual tokens among regions by their relevance; the sum is met exactly.

A policy first gives each region a target from its relevance. Then the targets are adjusted to the total: the
least relevant regions lose a level first, the most relevant gain one first, and the first regions with room
take the remainder. No region gets more tokens than it has at its native resolution.

The levels (16, 64, 200, 400 tokens) and thresholds are those of the ARR-COC design: see "Where the design
comes from" in docs/relevance.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.floating[Any]]
LADDER: tuple[int, ...] = (16, 64, 200, 400)
"""Tokens of a region at each level. Zero, and the region's native number of tokens, are levels, too."""
WHOLE_SHARE = 0.1, 0.9
"""The share of the total that the view of the whole takes: at a compress tension of 0, and of 1."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The numbers of tokens that one region may get.

    steps: ascending, from 0 to the region's native number of tokens.
    """

    steps: tuple[int, ...]

    @classmethod
    def for_region(cls, native: int, ladder: Sequence[int] = LADDER) -> Levels:
        """The levels of a region with `native` tokens at its native resolution."""
        return cls((0, *(step for step in ladder if step < native), native))

    def at_most(self, tokens: float) -> int:
        """The highest level that is not above `tokens`."""
        return max(step for step in self.steps if step <= max(0.0, tokens))

    def below(self, tokens: int) -> int:
        """The next level below `tokens`; 0 if there is none."""
        return max((step for step in self.steps if step < tokens), default=0)

    def above(self, tokens: int) -> int | None:
        """The next level above `tokens`; None if there is none."""
        return next((step for step in self.steps if step > tokens), None)


Policy = Callable[[Scores, NDArray[np.int64]], NDArray[np.float64]]
"""Maps scores in [0, 1] and native numbers of tokens to targets in tokens; all (regions,)."""


def thresholds(scores: Scores, natives: NDArray[np.int64]) -> NDArray[np.float64]:
    """The rule of ARR-COC (docs/relevance.md): each level is the target of a quarter of the scores' range."""
    levels = np.asarray(LADDER)[np.digitize(scores, (0.25, 0.5, 0.75))]
    targets: NDArray[np.float64] = np.minimum(levels, natives).astype(np.float64)
    return targets


def sharp(scores: Scores, natives: NDArray[np.int64]) -> NDArray[np.float64]:
    """Targets of 0, so that the most relevant regions get all of their tokens while the total lasts."""
    return np.zeros(len(scores))


POLICIES: dict[str, Policy] = {"thresholds": thresholds, "sharp": sharp}


def entropy_total(relevance: Scores) -> int:
    """The total for an image without a given budget: exp(entropy of relevance), plus a ninth.

    The exponential of the entropy is the number of cells if relevance is even, and 1 if there is one peak.
    The ninth is for the view of the whole image. (The ARR-COC design scales the entropy itself to 64 to 400
    tokens; the exponential needs no range.)

    relevance: of the cells with content, any shape.
    """
    values = np.asarray(relevance, np.float64).ravel()
    values = values[values > 0]
    if not len(values):
        return 1
    share = values / values.sum()
    sharing = math.exp(-float((share * np.log(share)).sum()))
    return math.ceil(sharing / (1 - WHOLE_SHARE[0]) - 1e-9)


def whole_tokens(total: int, compress: float) -> int:
    """How many tokens of the total the view of the whole may take, at least one.

    compress: the tension between compress and particularize, in [0, 1].
    """
    low, high = WHOLE_SHARE
    return max(1, min(total, round(total * (low + (high - low) * compress))))


def allocate(
    scores: Sequence[float] | Scores,
    natives: Sequence[int],
    total: int,
    policy: str | Policy = "thresholds",
    demands: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Tokens of each region. They add up to `total` exactly, or to the sum of `natives` where that is less.

    scores: relevance in [0, 1]; of two equal regions the earlier counts as the more relevant.
    natives: tokens of each region at its native resolution.
    policy: a name in POLICIES, whose targets are levels; or a function, whose targets may be any number of
    tokens.
    demands: how many tokens of each region have content; all of them by default. No region gets more than its
        demand before every region has its demand.
    """
    values = np.asarray(scores, np.float32)
    limits = np.asarray(natives, np.int64)
    if total >= int(limits.sum()):
        return tuple(int(native) for native in limits)
    needs = limits if demands is None else np.minimum(np.asarray(demands, np.int64), limits)
    levels = [Levels.for_region(int(need)) for need in needs]
    if callable(policy):
        budgets = [int(target) for target in np.minimum(policy(values, limits), needs)]
    else:
        targets = np.minimum(POLICIES[policy](values, limits), needs)
        budgets = [level.at_most(float(target)) for level, target in zip(levels, targets, strict=True)]
    order = sorted(range(len(budgets)), key=lambda index: (-float(values[index]), index))
    _shrink(budgets, levels, order, total)
    _grow(budgets, levels, order, total)
    _grow(budgets, [Levels((0, int(native))) for native in limits], order, total)
    return tuple(budgets)


def _shrink(budgets: list[int], levels: list[Levels], order: list[int], total: int) -> None:
    """Lower budgets by levels, the least relevant region first, until they fit the total."""
    excess = sum(budgets) - total
    while excess > 0:
        for index in reversed(order):
            if excess > 0 and budgets[index]:
                lower = levels[index].below(budgets[index])
                excess -= budgets[index] - lower
                budgets[index] = lower


def _grow(budgets: list[int], levels: list[Levels], order: list[int], total: int) -> None:
    """Raise budgets by levels, best region first; the first regions with room for it take the remainder."""
    left = total - sum(budgets)
    for index in order:
        while (higher := levels[index].above(budgets[index])) is not None and higher - budgets[index] <= left:
            left -= higher - budgets[index]
            budgets[index] = higher
    for index in order:
        room = max(0, min(left, levels[index].steps[-1] - budgets[index]))
        budgets[index] += room
        left -= room
