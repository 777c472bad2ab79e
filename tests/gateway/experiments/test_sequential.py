"""Evidence is a fair bet, intervals agree with simple twins, and they hold and narrow as they should."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.gateway.experiments import sequential
from fovea.gateway.experiments.sequential import (
    EVERYTHING,
    Array,
    Bets,
    Interval,
    Sample,
    amounts,
    bets,
    events,
    log_binomial_capital,
    log_capital,
    mean_difference,
    mean_interval,
    mean_ratio,
    percentile_ratio,
    ratings,
)
from fovea.gateway.experiments.statistics import TIME_STEP, time_bucket

ALPHA = 0.01
STARS = np.array([0.05, 0.05, 0.15, 0.40, 0.35])


def slow_capital(data: list[float], mean: float, stakes: Bets) -> float:
    """Play the game one observation after the other, for every share of the capital."""
    total = 0.0
    for share, log_weight in zip(stakes.shares.tolist(), stakes.log_weights.tolist(), strict=True):
        capital = math.exp(log_weight)
        for value in data:
            capital *= 1 - share + share * value / mean
        total += capital
    return total


def counted(data: list[float]) -> tuple[Array, Array]:
    values, counts = np.unique(np.array(data), return_counts=True)
    return values, counts.astype(float)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=12), st.floats(0.1, 2.5))
def test_capital_from_counts_is_that_of_the_game(data: list[float], mean: float) -> None:
    stakes = bets(0.1)
    found = log_capital(*counted(data), np.array([mean]), stakes)[0]
    assert math.exp(found) == pytest.approx(slow_capital(data, mean, stakes))


@pytest.mark.parametrize("chance", [0.02, 0.3, 0.95])
def test_the_binomial_game_is_the_same_game(chance: float) -> None:
    hits = np.arange(9.0)
    found = log_binomial_capital(hits, 8.0, chance, bets(0.2))
    for hit in range(9):
        data = [1.0] * hit + [0.0] * (8 - hit)
        assert math.exp(found[hit]) == pytest.approx(slow_capital(data, chance, bets(0.2)))


@pytest.mark.parametrize("truth", [0.25, 0.6])
@pytest.mark.parametrize("supposed", [0.6, 0.7])
def test_the_game_is_fair_at_the_supposed_mean_and_unfavourable_below(truth: float, supposed: float) -> None:
    """The expected capital over all outcomes of 6 observations is 1, or less."""
    expected = 0.0
    for data in itertools.product([0.0, 1.0], repeat=6):
        chance = math.prod(truth if value else 1 - truth for value in data)
        expected += chance * slow_capital(list(data), supposed, bets(0.1))
    assert expected == pytest.approx(1.0) if truth == supposed else expected < 1


@given(st.lists(st.floats(0, 10), min_size=1, max_size=10), st.floats(0.1, 9), st.floats(0.01, 5))
def test_capital_falls_as_the_supposed_mean_grows(data: list[float], mean: float, more: float) -> None:
    found = log_capital(*counted(data), np.array([mean, mean + more]), bets(0.1))
    assert found[1] <= found[0] + 1e-9


@given(st.integers(0, 40), st.integers(1, 400))
def test_the_interval_of_a_rate_holds_the_estimate_and_ends_where_evidence_begins(
    bad: int, good: int
) -> None:
    sample = events(bad, bad + good)
    found = mean_interval(sample, ALPHA)
    assert found.low <= bad / (bad + good) <= found.high
    limit = math.log(2 / ALPHA)
    if found.low > 0:
        assert sample.log_above(np.array([found.low]))[0] >= limit
        assert sample.log_above(np.array([found.low * 1.001]))[0] < limit + 0.2
    assert found.high == 1 or sample.log_below(np.array([found.high]))[0] >= limit


def slow_percentile_ratio(old: list[float], new: list[float], share: float) -> Interval:
    """Examine every pair of buckets by loops."""

    def evidence(times: list[float], bucket: int) -> float:
        buckets = [time_bucket(each) for each in times]
        lower, higher = sum(b < bucket for b in buckets), sum(b > bucket for b in buckets)
        args = (np.array([float(lower)]), np.array([float(higher)]), float(len(times)), share / 100)
        return float(sequential.percentile_evidence(*args)[0])

    ends = [(min(map(time_bucket, each)) - 1, max(map(time_bucket, each)) + 1) for each in (old, new)]
    low, high = math.inf, -math.inf
    for i, j in itertools.product(*(range(first, last + 1) for first, last in ends)):
        if evidence(old, i) + evidence(new, j) < math.log(1 / ALPHA):
            low = -math.inf if i == ends[0][1] or j == ends[1][0] else min(low, j - i)
            high = math.inf if i == ends[0][0] or j == ends[1][1] else max(high, j - i)
    return Interval(math.exp((low - 1) * TIME_STEP), math.exp((high + 1) * TIME_STEP))


def histogram(times: list[float]) -> dict[int, float]:
    counts: dict[int, float] = {}
    for each in times:
        counts[time_bucket(each)] = counts.get(time_bucket(each), 0) + 1
    return counts


@settings(max_examples=10)
@given(
    st.lists(st.sampled_from([1.0, 1.02, 1.05]), min_size=1, max_size=80),
    st.lists(st.sampled_from([1.0, 1.03, 1.06]), min_size=1, max_size=80),
    st.sampled_from([50.0, 95.0]),
)
def test_the_ratio_of_percentiles_is_that_of_all_pairs(
    old: list[float], new: list[float], share: float
) -> None:
    found = percentile_ratio(histogram(old), histogram(new), share, ALPHA)
    twin = slow_percentile_ratio(old, new, share)
    assert (found.low, found.high) == pytest.approx((twin.low, twin.high))


def test_the_ratio_of_means_holds_every_plausible_pair() -> None:
    """No pair of means with little evidence against it has a ratio outside of the interval."""
    rng = np.random.default_rng(0)
    old, new = (ratings(np.bincount(rng.choice(5, n, p=STARS), minlength=5).astype(float)) for n in (80, 120))
    found = mean_ratio(old, new, ALPHA, offset=1.0)
    means = np.linspace(0.01, 3.99, 400)
    evidence = [sequential.both(each.log_above(means), each.log_below(means)) for each in (old, new)]
    plausible = evidence[0][:, None] + evidence[1] < math.log(1 / ALPHA)
    ratios = ((means + 1) / (means[:, None] + 1))[plausible]
    assert found.low <= ratios.min()
    assert ratios.max() <= found.high
    assert (ratios.min(), ratios.max()) == pytest.approx((found.low, found.high), rel=0.01)


def test_the_difference_of_rates_holds_every_plausible_pair() -> None:
    old, new = events(3, 400), events(20, 500)
    found = mean_difference(old, new, ALPHA)
    rates = np.linspace(0.0005, 0.2, 400)
    evidence = [sequential.both(each.log_above(rates), each.log_below(rates)) for each in (old, new)]
    plausible = evidence[0][:, None] + evidence[1] < math.log(1 / ALPHA)
    differences = (rates - rates[:, None])[plausible]
    assert found.low <= differences.min()
    assert differences.max() <= found.high
    assert (differences.min(), differences.max()) == pytest.approx((found.low, found.high), abs=0.003)


def test_arms_without_data_say_nothing() -> None:
    empty, full = events(0, 0), events(1, 10)
    assert mean_interval(empty, ALPHA) == Interval(0, 1)
    assert mean_difference(empty, full, ALPHA) == Interval(-1, 1)
    assert mean_ratio(ratings(np.zeros(5)), ratings(np.ones(5)), ALPHA, 1.0) == EVERYTHING
    assert percentile_ratio({}, {1: 5}, 95, ALPHA) == EVERYTHING


def test_few_times_do_not_bound_a_percentile() -> None:
    few = {0: 20.0}
    assert percentile_ratio(few, few, 95, ALPHA) == EVERYTHING


def test_costs_of_nothing_have_no_ratio() -> None:
    free = amounts(np.array([0.0]), np.array([100.0]), 1000.0)
    assert mean_ratio(free, free, ALPHA) == EVERYTHING


@pytest.mark.parametrize(
    "sample", [ratings(np.array([0, 0, 0, 0, 9.0])), ratings(np.array([7.0, 0, 0, 0, 0]))]
)
def test_ratings_at_one_end(sample: Sample) -> None:
    found = mean_interval(sample, ALPHA)
    assert found.low <= sample.mean <= found.high
    found = mean_ratio(sample, sample, ALPHA, 1.0)
    assert found.low <= 1.0 <= found.high


def test_intervals_narrow_with_the_square_root_of_the_requests() -> None:
    widths = []
    for total in (1000, 100_000):
        found = mean_interval(events(0.2 * total, total), ALPHA)
        widths.append(found.high - found.low)
    assert 6 < widths[0] / widths[1] < 14


def test_atoms_are_allowed() -> None:
    """The p95 is in an atom that holds 20% of the times: it is found, and nothing else is excluded."""
    times = {0: 800.0, 30: 200.0}
    found = percentile_ratio(times, times, 95, ALPHA)
    assert found.low <= 1.0 <= found.high
    assert found.high < math.exp(3 * TIME_STEP)
