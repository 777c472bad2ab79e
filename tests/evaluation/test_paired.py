"""Paired comparison of two settings on the same questions: difference, interval and p value."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.evaluation.score import PairedCounts, wilson

COUNTS = st.integers(0, 60)
TABLES = st.tuples(COUNTS, COUNTS, COUNTS, COUNTS).filter(any).map(lambda counts: PairedCounts(*counts))


def swap(paired: PairedCounts) -> PairedCounts:
    return PairedCounts(paired.both, paired.only_second, paired.only_first, paired.neither)


def test_answers_are_counted_in_pairs() -> None:
    first = [True, True, True, False, False]
    second = [True, False, False, True, False]
    assert PairedCounts.from_answers(first, second) == PairedCounts(
        both=1, only_first=2, only_second=1, neither=1
    )


@pytest.mark.parametrize(("first", "second"), [([True], []), ([], [])])
def test_unequal_or_empty_answers_are_refused(first: list[bool], second: list[bool]) -> None:
    with pytest.raises(ValueError, match="are not pairs; accepted: equal numbers, at least 1"):
        PairedCounts.from_answers(first, second)


def test_the_interval_combines_wilson_intervals_by_the_correlation() -> None:
    """48 of 50 right against 38 of 50 right, 36 of them by both.

    No question was answered wrong by both, so the correlation is negative, and the continuity correction does
    not change it: -24 / sqrt(48 * 2 * 38 * 12).
    """
    paired = PairedCounts(36, 12, 2, 0)
    low, high = wilson(48, 50)
    other_low, other_high = wilson(38, 50)
    correlation = -24 / math.sqrt(48 * 2 * 38 * 12)
    below, above = 0.96 - low, other_high - 0.76
    assert paired.difference == pytest.approx(0.2)
    assert paired.interval[0] == pytest.approx(
        0.2 - math.sqrt(below**2 - 2 * correlation * below * above + above**2)
    )
    below, above = 0.76 - other_low, high - 0.96
    assert paired.interval[1] == pytest.approx(
        0.2 + math.sqrt(above**2 - 2 * correlation * above * below + below**2)
    )
    assert paired.interval == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_a_positive_correlation_makes_the_interval_narrower() -> None:
    apart, together = PairedCounts(20, 12, 2, 16), PairedCounts(32, 6, 6, 6)
    assert apart.interval == pytest.approx((0.0562, 0.3292), abs=5e-5)
    width = together.interval[1] - together.interval[0]
    low, high = wilson(38, 50)
    assert width < 2 * math.hypot(high - 0.76, 0.76 - low)


@pytest.mark.parametrize(
    ("counts", "p_value"),
    [
        ((5, 0, 0, 5), 1.0),
        ((0, 6, 0, 0), 2 / 64),
        ((9, 1, 5, 9), 2 * (1 + 6) / 64),
        ((0, 3, 3, 0), 1.0),
        ((0, 1200, 0, 0), 0.0),
    ],
)
def test_the_p_value_is_that_of_a_fair_coin_on_the_differing_questions(
    counts: tuple[int, int, int, int], p_value: float
) -> None:
    assert PairedCounts(*counts).p_value == pytest.approx(p_value, abs=1e-12)


@given(TABLES)
def test_the_interval_contains_the_difference_and_is_mirrored_when_the_pair_is_swapped(
    paired: PairedCounts,
) -> None:
    low, high = paired.interval
    assert -1 <= low <= paired.difference + 1e-12
    assert paired.difference - 1e-12 <= high <= 1
    other = swap(paired)
    assert other.interval == pytest.approx((-high, -low), abs=1e-12)
    assert other.p_value == paired.p_value
    assert (other.better, other.worse) == (paired.worse, paired.better)


@given(COUNTS, st.integers(1, 60), COUNTS)
def test_equal_settings_are_neither_better_nor_worse(both: int, each: int, neither: int) -> None:
    paired = PairedCounts(both, each, each, neither)
    assert not paired.better
    assert not paired.worse


def test_better_means_that_the_whole_interval_is_above_zero() -> None:
    assert PairedCounts(50, 20, 5, 25).better
    assert PairedCounts(50, 5, 20, 25).worse
    assert not PairedCounts(50, 7, 5, 38).better
