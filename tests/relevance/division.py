"""The property of a division of tokens among regions, for the tests of `attending` and `policy`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def assert_more_for_the_more_relevant(
    scores: Sequence[float], natives: Sequence[int], demands: Sequence[int], budgets: Sequence[int]
) -> None:
    """Compare every two regions, as the docstring of `attending.allocate` says."""
    needs = [min(demand, native) for demand, native in zip(demands, natives, strict=True)]
    shown = [min(tokens, need) for tokens, need in zip(budgets, needs, strict=True)]
    order = sorted(range(len(scores)), key=lambda index: (-np.float32(scores[index]), index))
    for more, less in combinations(order, 2):
        if needs[less] and shown[more] < needs[more]:
            assert (shown[more] + 1) * needs[less] > shown[less] * needs[more]
        assert budgets[less] <= needs[less] or budgets[more] == natives[more]
