"""Two ways to answer the same questions: who is better, and by how much more than chance."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.evaluation.pairs import Paired
from fovea.evaluation.score import wilson

COUNTS = st.integers(0, 60)
TABLES = st.tuples(COUNTS, COUNTS, COUNTS, COUNTS).filter(any).map(lambda counts: Paired(*counts))


def swapped(paired: Paired) -> Paired:
    return Paired(paired.both, paired.only_second, paired.only_first, paired.neither)


def test_answers_are_counted_in_pairs() -> None:
    first = [True, True, True, False, False]
    second = [True, False, False, True, False]
    assert Paired.of(first, second) == Paired(both=1, only_first=2, only_second=1, neither=1)


@pytest.mark.parametrize(("first", "second"), [([True], []), ([], [])])
def test_what_is_no_pairs_is_refused(first: list[bool], second: list[bool]) -> None:
    with pytest.raises(ValueError, match="are no pairs; accepted: as many, and some"):
        Paired.of(first, second)


def test_the_interval_without_correlation_is_wilson_put_together() -> None:
    """36 + 12 of 50 against 36 + 2 of 50. Nobody failed both, so the correction leaves the negative correlation alone:
    -24 / sqrt(48 * 2 * 38 * 12)."""
    paired = Paired(36, 12, 2, 0)
    low, high = wilson(48, 50)
    other_low, other_high = wilson(38, 50)
    alike = -24 / math.sqrt(48 * 2 * 38 * 12)
    below, above = 0.96 - low, other_high - 0.76
    assert paired.difference == pytest.approx(0.2)
    assert paired.interval[0] == pytest.approx(
        0.2 - math.sqrt(below**2 - 2 * alike * below * above + above**2)
    )
    below, above = 0.76 - other_low, high - 0.96
    assert paired.interval[1] == pytest.approx(
        0.2 + math.sqrt(above**2 - 2 * alike * above * below + below**2)
    )
    assert paired.interval == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_a_positive_correlation_makes_it_narrower() -> None:
    apart, together = Paired(20, 12, 2, 16), Paired(32, 6, 6, 6)
    assert apart.interval == pytest.approx((0.0562, 0.3292), abs=5e-5)
    width = together.interval[1] - together.interval[0]
    low, high = wilson(38, 50)
    assert width < 2 * math.hypot(high - 0.76, 0.76 - low)


@pytest.mark.parametrize(
    ("counts", "chance"),
    [
        ((5, 0, 0, 5), 1.0),
        ((0, 6, 0, 0), 2 / 64),
        ((9, 1, 5, 9), 2 * (1 + 6) / 64),
        ((0, 3, 3, 0), 1.0),
        ((0, 1200, 0, 0), 0.0),
    ],
)
def test_the_exact_test_is_a_fair_coin_on_the_differing_questions(
    counts: tuple[int, int, int, int], chance: float
) -> None:
    assert Paired(*counts).chance == pytest.approx(chance, abs=1e-12)


@given(TABLES)
def test_the_interval_holds_the_difference_and_turns_with_the_pair(paired: Paired) -> None:
    low, high = paired.interval
    assert -1 <= low <= paired.difference + 1e-12
    assert paired.difference - 1e-12 <= high <= 1
    other = swapped(paired)
    assert other.interval == pytest.approx((-high, -low), abs=1e-12)
    assert other.chance == paired.chance
    assert (other.better, other.worse) == (paired.worse, paired.better)


@given(COUNTS, st.integers(1, 60), COUNTS)
def test_equals_are_neither_better_nor_worse(both: int, each: int, neither: int) -> None:
    paired = Paired(both, each, each, neither)
    assert not paired.better
    assert not paired.worse


def test_better_needs_more_than_the_interval() -> None:
    assert Paired(50, 20, 5, 25).better
    assert Paired(50, 5, 20, 25).worse
    assert not Paired(50, 7, 5, 38).better
