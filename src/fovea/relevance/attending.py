"""Divides a total of visual tokens among regions by their relevance; the sum is met exactly.

The tokens are given in three rounds, and in each the most relevant region comes first. The first round gives
each region a share of the tokens that its content has at native resolution; a policy sets the share. The
second round gives it the rest of these tokens, and the third one its blank cells. The rounds end when the
total is spent, so at most one region gets only a part of what its round gives.

The levels (16, 64, 200, 400 tokens) and thresholds are those of the ARR-COC design: see "Where the design
comes from" in docs/relevance.md. Here a level is a share, because regions differ in size and content, and 64
tokens are much for one and little for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.floating[Any]]
LADDER: tuple[int, ...] = (16, 64, 200, 400)
"""Tokens of a region of usual size at each level."""
USUAL = 200
"""Tokens of a region of usual size at its native resolution. A level of 400 asks for no more than that."""
WHOLE_SHARE = 0.1, 0.9
"""The share of the total that the view of the whole takes: at a compress tension of 0, and of 1."""

Policy = Callable[[Scores], NDArray[np.float64]]
"""Maps scores in [0, 1] to shares in [0, 1] of the tokens that a region's content has at native resolution;
both (regions,). A higher score never gets a smaller share."""


def thresholds(scores: Scores) -> NDArray[np.float64]:
    """The rule of ARR-COC (docs/relevance.md): each level is the target of a quarter of the scores' range.

    The range ends at the highest score, so the most relevant region's target is its native resolution.
    """
    levels: NDArray[np.float64] = np.minimum(np.asarray(LADDER) / USUAL, 1.0)
    return levels[np.digitize(scores, np.asarray((0.25, 0.5, 0.75)) * scores.max())]


def sharp(scores: Scores) -> NDArray[np.float64]:
    """Shares of 0, so that the most relevant regions get all of their tokens while the total lasts."""
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
    policy: a name in POLICIES, or a function.
    demands: how many tokens of each region have content; all of them by default.

    The share at which a region is shown is its number of tokens divided by its demand, and 1 if it has more
    tokens than that: blank cells that are left out count as shown. A region without content has no share. Of
    any two regions:

    - the less relevant one's share is not the larger one, except for rounding to whole tokens: with one
      token more, the more relevant one's share would be the larger one;
    - the less relevant one has more tokens than its demand only if the more relevant one has all of its
      tokens.

    No region has more tokens than its demand before every region has its demand.
    """
    limits = np.asarray(natives, np.int64)
    needs = limits if demands is None else np.minimum(np.asarray(demands, np.int64), limits)
    order = _order(scores)
    budgets = np.zeros(len(limits), np.int64)
    for most in (_targets(scores, needs, policy), needs, limits):
        room = (most - budgets)[order]
        left = total - int(budgets.sum())
        budgets[order] += np.clip(left - (np.cumsum(room) - room), 0, room)
    return tuple(budgets.tolist())


def find_cut(
    scores: Sequence[float] | Scores,
    demands: Sequence[int],
    budgets: Sequence[int],
    policy: str | Policy = "thresholds",
) -> tuple[int, int]:
    """The region that is too large for its budget, and how many cells a part of it at native resolution has.

    It is the most relevant region whose budget is below its demand. The rest of the region keeps the target
    of its policy, so the part takes the tokens above that target. If the target is the native resolution, the
    part takes all of the region's tokens.

    Returns the region's index, and a number of cells with content; (0, 0) if no region is too large.

    scores, demands, policy: as in `allocate`, which made the budgets.
    """
    needs, given = np.asarray(demands, np.int64), np.asarray(budgets, np.int64)
    order = _order(scores)
    below = order[(given < needs)[order]]
    if not len(below):
        return 0, 0
    index = int(below[0])
    need, budget, target = needs[index], given[index], _targets(scores, needs, policy)[index]
    if target == need:
        return index, int(budget)
    return index, max(0, int((budget - target) * need // (need - target)))


def _order(scores: Sequence[float] | Scores) -> NDArray[np.int64]:
    """Indices of the regions, the most relevant one first; among equal ones the earlier."""
    return np.argsort(-np.asarray(scores, np.float32), kind="stable")


def _targets(
    scores: Sequence[float] | Scores, needs: NDArray[np.int64], policy: str | Policy
) -> NDArray[np.int64]:
    """Whole tokens of each region by the policy. needs: the region's tokens with content."""
    shares = (policy if callable(policy) else POLICIES[policy])(np.asarray(scores, np.float32))
    # The small addend makes up for the rounding of a product that would be a whole number.
    return np.floor(shares * needs + 1e-9).astype(np.int64)
