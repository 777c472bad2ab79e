"""The properties of a division of tokens among regions, for the tests of `attending` and `policy`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def assert_needs_come_first(demands: Sequence[int], needs: Sequence[int], budgets: Sequence[int]) -> None:
    """No region has more than its need while another one that is asked about has less than its own."""
    first = [min(need, demand) for need, demand in zip(needs, demands, strict=True)]
    if any(tokens < need for tokens, need in zip(budgets, first, strict=True)):
        assert all(tokens <= need for tokens, need in zip(budgets, first, strict=True))


def assert_more_for_the_more_relevant(
    scores: Sequence[float],
    natives: Sequence[int],
    demands: Sequence[int],
    needs: Sequence[int],
    budgets: Sequence[int],
) -> None:
    """Compare every two regions, as the docstring of `attending.allocate` says."""
    wants = [min(demand, native) for demand, native in zip(demands, natives, strict=True)]
    shown = [min(tokens, want) for tokens, want in zip(budgets, wants, strict=True)]
    order = sorted(range(len(scores)), key=lambda index: (-np.float32(scores[index]), index))
    for more, less in combinations(order, 2):
        if budgets[more] < min(needs[more], wants[more]):
            assert budgets[less] == 0, "needs are met in the order of relevance"
        if wants[less] and not needs[less] and shown[more] < wants[more]:
            assert (shown[more] + 1) * wants[less] > shown[less] * wants[more]
        assert budgets[less] <= wants[less] or budgets[more] == natives[more]
