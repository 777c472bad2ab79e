"""Percentiles by the nearest-rank method."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fovea.core.measure import percentile


def test_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([7.0], 50) == 7
    assert math.isnan(percentile([], 99))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_at_least_that_share_of_the_values_do_not_exceed_it(values: list[float], share: int) -> None:
    result = percentile(sorted(values), share)
    assert result in values
    assert sum(value <= result for value in values) >= len(values) * share / 100
    assert sum(value < result for value in values) < len(values) * share / 100
