"""How often drafts turn out right, learnt from all drafts, those that were not computed included.

A draft is compared with the token that the answer then gets. This needs no row, so drafters are judged while
speculation is off, too, and those that are not chosen.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import ceil

from fovea.engine.speculate.texts import Continuation

LEVELS = 10
"""Number of ranges of a draft's share of the weight."""
PRIOR = 8.0
"""The share itself counts like so many comparisons. In a request's factor it is a number of drafts."""
MEMORY = 512
"""Comparisons after which all counts are halved, so that old ones lose weight."""
Key = tuple[str, int, int]


class Acceptance:
    """Counts of right drafts, by drafter, share and length of the match."""

    def __init__(self) -> None:
        self._counts: dict[Key, list[float]] = {}

    def chance(self, drafter: str, share: float, matched: int) -> float:
        """Return the probability that a draft is right if those before it are.

        share, matched: as in `Continuation`. A share that is no number, of a broken layer, counts as 0.
        """
        share = share if 0 <= share <= 1 else 0.0
        right, seen = self._counts.get(_key(drafter, share, matched), (0.0, 0.0))
        return (right + PRIOR * share) / (seen + PRIOR)

    def note(self, drafter: str, share: float, matched: int, *, right: bool) -> None:
        """Learn from one draft whose predecessors were right."""
        share = share if 0 <= share <= 1 else 0.0
        counts = self._counts.setdefault(_key(drafter, share, matched), [0.0, 0.0])
        counts[0] += right
        counts[1] += 1
        if counts[1] > MEMORY:
            counts[:] = counts[0] / 2, counts[1] / 2


class RequestAcceptance:
    """How much better or worse than usual the drafts of one request are.

    factor: right drafts over expected ones, near 1 at first.
    """

    def __init__(self) -> None:
        self._right = self._expected = PRIOR

    @property
    def factor(self) -> float:
        return self._right / self._expected

    def note(self, chance: float, *, right: bool) -> None:
        """Learn from one draft. chance: that it would be right, without the factor."""
        self._right += right
        self._expected += chance


def compare(found: Continuation, tokens: Seq[int]) -> list[bool]:
    """Return for each draft whether it was right, up to the first wrong one, or the last that is known.

    tokens: what the answer got in place of the drafts.
    """
    verdicts: list[bool] = []
    for draft, token in zip(found.tokens, tokens, strict=False):
        verdicts.append(draft == token)
        if draft != token:
            break
    return verdicts


def _key(drafter: str, share: float, matched: int) -> Key:
    return drafter, ceil(LEVELS * share), matched.bit_length()
