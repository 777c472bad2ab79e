"""Percentiles are within a bucket of the true ones, and divided amounts keep their mean exactly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.measure import percentile
from fovea.gateway.experiments.statistics import (
    TIME_STEP,
    amount_ceiling,
    amount_edge,
    amount_shares,
    time_bucket,
    time_percentile,
)

TIMES = st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=60)


@given(st.floats(1e-6, 1e6))
def test_a_time_is_in_its_bucket(seconds: float) -> None:
    bucket = time_bucket(seconds)
    assert math.exp(bucket * TIME_STEP) <= seconds * (1 + 1e-12)
    assert seconds <= math.exp((bucket + 1) * TIME_STEP) * (1 + 1e-12)


@given(TIMES, st.sampled_from([50.0, 95.0, 99.0]))
def test_percentiles_are_within_a_bucket_of_the_true_ones(times: list[float], share: float) -> None:
    counts: dict[int, float] = {}
    for each in times:
        counts[time_bucket(each)] = counts.get(time_bucket(each), 0) + 1
    found = time_percentile(counts, share)
    assert found is not None
    assert abs(math.log(found / percentile(sorted(times), share))) <= TIME_STEP / 2 + 1e-9


def test_no_times_have_no_percentile() -> None:
    assert time_percentile({}, 95) is None


@given(st.integers(0, 10**9))
def test_a_divided_amount_keeps_its_mean(amount: int) -> None:
    shares = amount_shares(amount)
    assert sum(share for _, share in shares) == 1
    assert sum(share * amount_edge(edge) for edge, share in shares) == pytest.approx(amount, rel=1e-6)
    assert all(amount_edge(edge) <= amount_ceiling(max(amount, 1)) for edge, share in shares if share)


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=30))
def test_sums_of_shares_are_exact_in_any_order(amounts: list[int]) -> None:
    def total(values: list[int]) -> dict[int, float]:
        counts: dict[int, float] = {}
        for value in values:
            for edge, share in amount_shares(value):
                counts[edge] = counts.get(edge, 0) + share
        return counts

    assert total(amounts) == total(sorted(amounts)) == total(amounts[::-1])
