"""Relevance to a budget: how many tokens each region gets, of a total that is met exactly.

A policy says what each region would like; then the total is conserved: the least relevant regions lose a level first,
the most relevant gain one first, and one region takes what remains. No region gets more than its native resolution
carries. Levels and thresholds are those of the ARR-COC documents (16, 64, 200, 400 tokens).
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
"""Tokens of a region at each level; none, and what it carries natively, are levels, too."""
FLOOR, CEILING = 64, 400
"""Of a region under the policies that give any number in between."""
WHOLE_SHARE = 0.1, 0.9
"""Of the total, that the view of the whole takes: at full particularity, and at full compression."""


@dataclass(frozen=True, slots=True)
class Levels:
    """What one region may get, ascending, from 0 to what it carries."""

    steps: tuple[int, ...]

    @classmethod
    def of(cls, native: int, ladder: Sequence[int] = LADDER) -> Levels:
        return cls((0, *(step for step in ladder if step < native), native))

    def at_most(self, tokens: float) -> int:
        return max(step for step in self.steps if step <= max(0.0, tokens))

    def below(self, tokens: int) -> int:
        return max((step for step in self.steps if step < tokens), default=0)

    def above(self, tokens: int) -> int | None:
        return next((step for step in self.steps if step > tokens), None)


Policy = Callable[[Scores, NDArray[np.int64]], NDArray[np.float64]]
"""Scores in [0, 1] and native tokens, both (regions,), to the tokens that each region would like."""


def thresholds(scores: Scores, natives: NDArray[np.int64]) -> NDArray[np.float64]:
    """The documents' rule: a quarter of the range for each level."""
    wanted = np.asarray(LADDER)[np.digitize(scores, (0.25, 0.5, 0.75))]
    found: NDArray[np.float64] = np.minimum(wanted, natives).astype(np.float64)
    return found


def power(
    scores: Scores, natives: NDArray[np.int64], exponent: float = 4.02, offset: float = 0.0
) -> NDArray[np.float64]:
    """64 to 400 by a power of the score, scaled to what the region carries. exponent: the design's first value."""
    share = np.clip(np.asarray(scores, np.float64) ** exponent + 0.3 * math.tanh(offset), 0, 1)
    return natives * (FLOOR + (CEILING - FLOOR) * share) / CEILING


def sharp(scores: Scores, natives: NDArray[np.int64]) -> NDArray[np.float64]:
    """All or nothing: the most relevant regions at native resolution, as far as the total goes."""
    return np.zeros(len(scores))


POLICIES: dict[str, Policy] = {"thresholds": thresholds, "power": power, "sharp": sharp}
CONTINUOUS = frozenset({"power"})
"""Those that give any number of tokens; the others give levels."""


def entropy_total(worth: Scores) -> int:
    """A total left to the image: as many tokens as cells share its relevance, and room for a view of the whole beside them.

    worth: of cells with content, any shape. How many share it is the exponential of its entropy: of even relevance all of
    them, of one peak one. (The documents' Part 43 has the entropy itself, between 64 and 400 tokens; its exponential needs no
    range.)
    """
    values = np.asarray(worth, np.float64).ravel()
    values = values[values > 0]
    if not len(values):
        return 1
    share = values / values.sum()
    sharing = math.exp(-float((share * np.log(share)).sum()))
    return math.ceil(sharing / (1 - WHOLE_SHARE[0]) - 1e-9)


def whole_tokens(total: int, compress: float) -> int:
    """At most how many of the total show the whole, by the tension between compressing and particularizing; at least one."""
    low, high = WHOLE_SHARE
    return max(1, min(total, round(total * (low + (high - low) * compress))))


def allocate(
    scores: Sequence[float] | Scores,
    natives: Sequence[int],
    total: int,
    policy: str = "thresholds",
    demands: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Tokens of each region; they add up to `total` exactly, or to all that the regions carry where that is less.

    scores: in [0, 1]; among equals the earlier region is the more relevant. demands: how many tokens of a region have any
    content, all by default; nobody gets more before everybody has that.
    """
    values = np.asarray(scores, np.float32)
    carried = np.asarray(natives, np.int64)
    if total >= int(carried.sum()):
        return tuple(int(native) for native in carried)
    needed = carried if demands is None else np.minimum(np.asarray(demands, np.int64), carried)
    levels = [Levels.of(int(need)) for need in needed]
    wanted = np.minimum(POLICIES[policy](values, carried), needed)
    if policy in CONTINUOUS:
        given = [int(want) for want in wanted]
    else:
        given = [level.at_most(float(want)) for level, want in zip(levels, wanted, strict=True)]
    order = sorted(range(len(given)), key=lambda index: (-float(values[index]), index))
    _shrink(given, levels, order, total)
    _grow(given, levels, order, total)
    _grow(given, [Levels((0, int(native))) for native in carried], order, total)
    return tuple(given)


def _shrink(given: list[int], levels: list[Levels], order: list[int], total: int) -> None:
    over = sum(given) - total
    while over > 0:
        for index in reversed(order):
            if over > 0 and given[index]:
                lower = levels[index].below(given[index])
                over -= given[index] - lower
                given[index] = lower


def _grow(given: list[int], levels: list[Levels], order: list[int], total: int) -> None:
    """Upwards by whole levels as long as one fits; what remains goes to the first region that can take more."""
    left = total - sum(given)
    for index in order:
        while (higher := levels[index].above(given[index])) is not None and higher - given[index] <= left:
            left -= higher - given[index]
            given[index] = higher
    for index in order:
        room = max(0, min(left, levels[index].steps[-1] - given[index]))
        given[index] += room
        left -= room
