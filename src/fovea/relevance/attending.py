"""Divides a total of visual tokens among regions by their relevance; the sum is met exactly.

The tokens are given in rounds, which end when the total is spent. First the regions that the question is
about get the tokens with which they can be read, one after the other. Then the regions share what is left by
their relevance, so that two of nearly equal relevance get nearly the same share of their content. Blank cells
come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.floating[Any]]
WHOLE_SHARE = 0.1, 0.9
"""The share of the total that the view of the whole takes: at a compress tension of 0, and of 1."""
STEEPNESS = 4.0
"""The share of a region's content that is shown grows with this power of its relevance."""


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
    demands: Sequence[int] | None = None,
    needs: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Tokens of each region. They add up to `total` exactly, or to the sum of `natives` where that is less.

    scores: relevance in [0, 1]; of two equal regions the earlier counts as the more relevant.
    natives: tokens of each region at its native resolution.
    demands: how many tokens of each region have content; all of them by default.
    needs: tokens with which each region that is asked about can be read, 0 for the others; by default 0.

    The share at which a region is shown is its number of tokens divided by its demand, and 1 if it has more
    tokens than that: blank cells that are left out count as shown. A region without content has no share.

    - As long as a region has less than its need, no less relevant region has more than its own need.
    - Of two regions without a need, the less relevant one's share is not the larger one, except for rounding
      to whole tokens.
    - No region has more tokens than its demand before every region has its demand.
    """
    limits = np.asarray(natives, np.int64)
    wants = limits if demands is None else np.minimum(np.asarray(demands, np.int64), limits)
    first = np.zeros_like(limits) if needs is None else np.minimum(np.asarray(needs, np.int64), wants)
    order = _order(scores)
    budgets = _in_order(np.zeros_like(limits), first, order, total)
    for most in (*_shares(np.asarray(scores, np.float64), wants, budgets, total), wants, limits):
        budgets = _in_order(budgets, np.maximum(most, budgets), order, total)
    return tuple(budgets.tolist())


def find_cut(
    scores: Sequence[float] | Scores, needs: Sequence[int], budgets: Sequence[int]
) -> tuple[int, int]:
    """The region that is too large for its budget, and how many cells a part of it at native resolution has.

    It is the most relevant region whose budget is below its need.

    Returns the region's index, and a number of cells with content; (0, 0) if no region is too large.
    """
    given = np.asarray(budgets, np.int64)
    order = _order(scores)
    below = order[(given < np.asarray(needs, np.int64))[order]]
    return (int(below[0]), int(given[below[0]])) if len(below) else (0, 0)


def _order(scores: Sequence[float] | Scores) -> NDArray[np.int64]:
    """Indices of the regions, the most relevant one first; among equal ones the earlier."""
    return np.argsort(-np.asarray(scores, np.float32), kind="stable")


def _in_order(
    budgets: NDArray[np.int64], most: NDArray[np.int64], order: NDArray[np.int64], total: int
) -> NDArray[np.int64]:
    """Fill up each region to `most`, one after the other, while the total lasts."""
    room = (most - budgets)[order]
    left = max(0, total - int(budgets.sum()))
    filled = budgets.copy()
    filled[order] += np.clip(left - (np.cumsum(room) - room), 0, room)
    return filled


def _shares(
    scores: NDArray[np.float64], wants: NDArray[np.int64], budgets: NDArray[np.int64], total: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens of each region if all show a share of their content that grows with their relevance.

    Returns the tokens at the largest shares that fit into the total, and those at the next larger shares. Of
    the regions that have a token more there, the most relevant get what is left.
    """
    worth = (scores / max(float(scores.max()), 1e-9)) ** STEEPNESS

    def given(factor: float) -> NDArray[np.int64]:
        shown = np.floor(np.minimum(1, factor * worth) * wants + 1e-9).astype(np.int64)
        return np.maximum(shown, budgets)

    low, high = 0.0, 1.0 / max(float(worth[worth > 0].min(initial=1.0)), 1e-12)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if given(middle).sum() <= total else (low, middle)
    return given(low), given(high)
