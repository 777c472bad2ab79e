from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fovea.core.percentile import percentile


def test_by_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([7.0], 50) == 7
    assert math.isnan(percentile([], 99))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_it_is_a_value_that_so_many_do_not_exceed(values: list[float], share: int) -> None:
    found = percentile(sorted(values), share)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * share / 100
    assert sum(value < found for value in values) < len(values) * share / 100
