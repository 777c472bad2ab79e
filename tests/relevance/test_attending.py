"""Budgets of regions: exact sums, native limits, content before blank cells, the policies, and the totals."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given
from numpy.typing import NDArray

from fovea.relevance.attending import (
    LADDER,
    POLICIES,
    WHOLE_SHARE,
    Levels,
    Scores,
    allocate,
    entropy_total,
    sharp,
    thresholds,
    whole_tokens,
)

scores = st.floats(0, 1, width=32)
regions = st.lists(st.tuples(scores, st.integers(1, 500), st.integers(0, 500)), min_size=1, max_size=24)
totals = st.integers(0, 3000)
policies = st.sampled_from(sorted(POLICIES))


@given(regions, totals, policies, st.booleans())
def test_sums_are_exact_and_no_region_exceeds_its_native_tokens(
    cases: list[tuple[float, int, int]], total: int, policy: str, demanding: bool
) -> None:
    relevance, natives, demands = (list(each) for each in zip(*cases, strict=True))
    budgets = allocate(relevance, natives, total, policy, demands if demanding else None)
    assert sum(budgets) == min(total, sum(natives))
    assert all(0 <= tokens <= native for tokens, native in zip(budgets, natives, strict=True))
    assert budgets == allocate(relevance, natives, total, policy, demands if demanding else None)


@given(regions, totals, policies)
def test_content_comes_before_blank_cells(
    cases: list[tuple[float, int, int]], total: int, policy: str
) -> None:
    """No region gets a blank token before every region has a token for each of its cells with content."""
    relevance, natives, demands = (list(each) for each in zip(*cases, strict=True))
    needed = [min(demand, native) for demand, native in zip(demands, natives, strict=True)]
    budgets = allocate(relevance, natives, total, policy, demands)
    if any(tokens > need for tokens, need in zip(budgets, needed, strict=True)):
        assert all(tokens >= need for tokens, need in zip(budgets, needed, strict=True))


@given(st.lists(st.integers(1, 400), min_size=1, max_size=20), totals, policies)
def test_demands_for_all_tokens_change_nothing(natives: list[int], total: int, policy: str) -> None:
    relevance = np.linspace(0, 1, len(natives)).astype(np.float32)
    assert allocate(relevance, natives, total, policy) == allocate(relevance, natives, total, policy, natives)


@given(st.integers(1, 30), st.integers(1, 400), totals, policies)
def test_among_equal_regions_the_earlier_gets_at_least_as_much(
    count: int, native: int, total: int, policy: str
) -> None:
    result = allocate([0.5] * count, [native] * count, total, policy)
    assert list(result) == sorted(result, reverse=True)


@given(st.lists(scores, min_size=2, max_size=20), st.integers(1, 400), totals, policies)
def test_among_regions_of_equal_size_the_more_relevant_gets_at_least_as_much(
    relevance: list[float], native: int, total: int, policy: str
) -> None:
    result = allocate(relevance, [native] * len(relevance), total, policy)
    ordered = [tokens for _, tokens in sorted(zip(relevance, result, strict=True), key=lambda pair: -pair[0])]
    distinct = len(set(relevance)) == len(relevance)
    assert not distinct or ordered == sorted(ordered, reverse=True)


def test_the_thresholds_of_the_design() -> None:
    relevance = np.array([0, 0.24, 0.25, 0.49, 0.5, 0.74, 0.75, 1])
    assert LADDER == (16, 64, 200, 400)
    assert thresholds(relevance, np.full(8, 1000)).tolist() == [16, 16, 64, 64, 200, 200, 400, 400]
    assert thresholds(relevance, np.full(8, 64)).tolist() == [16, 16, 64, 64, 64, 64, 64, 64]


def test_sharp_gives_all_to_the_most_relevant() -> None:
    """A remainder that is too small for another whole region goes to the next regions by levels."""
    assert not sharp(np.ones(3), np.full(3, 64)).any()
    assert allocate([0.2, 0.9, 0.5], [64, 64, 64], 128, "sharp") == (0, 64, 64)
    assert allocate([0.2, 0.9, 0.5], [64, 64, 64], 100, "sharp") == (16, 64, 20)


def test_targets_that_add_up_to_the_total_are_met() -> None:
    assert allocate([0.1, 0.3, 0.6, 0.9], [400] * 4, 680) == (16, 64, 200, 400)


def test_the_least_relevant_lose_a_level_first() -> None:
    assert allocate([0.9, 0.8, 0.1], [64, 64, 64], 128 + 15) == (64, 64, 15)
    assert allocate([0.9, 0.8, 0.1], [64, 64, 64], 80) == (64, 16, 0)
    assert allocate([0.9, 0.8, 0.7], [64, 64, 64], 7) == (7, 0, 0)


def test_the_most_relevant_gain_a_level_first() -> None:
    assert allocate([0.1, 0.2, 0.15], [64, 64, 64], 48 + 48) == (16, 64, 16)


def test_levels() -> None:
    levels = Levels.for_region(100)
    assert levels.steps == (0, 16, 64, 100)
    assert Levels.for_region(64).steps == (0, 16, 64)
    assert [levels.at_most(tokens) for tokens in (-1, 0, 15.9, 16, 99, 100, 400)] == [
        0,
        0,
        0,
        16,
        64,
        100,
        100,
    ]
    assert [levels.below(tokens) for tokens in (0, 1, 16, 50, 100)] == [0, 0, 0, 16, 64]
    assert [levels.above(tokens) for tokens in (0, 16, 99, 100)] == [16, 64, 100, None]
    assert Levels.for_region(0).above(0) is None


@given(regions, totals, st.sampled_from(sorted(POLICIES)))
def test_under_policies_of_levels_one_region_at_most_is_between_levels(
    cases: list[tuple[float, int, int]], total: int, policy: str
) -> None:
    """That region takes the remainder of the total."""
    relevance, natives, _ = (list(each) for each in zip(*cases, strict=True))
    budgets = allocate(relevance, natives, total, policy)
    between = [
        tokens
        for tokens, native in zip(budgets, natives, strict=True)
        if tokens not in Levels.for_region(native).steps
    ]
    assert len(between) <= 1


def test_a_policy_of_ones_own_gives_any_number_of_tokens() -> None:
    """A function gives 84 tokens to a score of 0.5; policies of levels would give 64."""

    def own(scores: Scores, natives: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.interp(scores, [0.0, 0.5, 1.0], [64.0, 84.0, 400.0])

    assert allocate([0.0, 0.5, 1.0], [400] * 3, 64 + 84 + 400, own) == (64, 84, 400)
    relevance = [0.6, 0.7, 0.8, 0.9]
    targets = tuple(int(want) for want in own(np.array(relevance), np.full(4, 400)))
    assert not set(targets) & set(LADDER)
    assert allocate(relevance, [400] * 4, sum(targets), own) == targets


@given(st.integers(1, 100_000), st.floats(0, 1), st.floats(0, 1))
def test_the_view_of_the_whole_grows_with_the_compress_tension(total: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 1 <= whole_tokens(total, low) <= whole_tokens(total, high) <= total
    for compress in (low, high):
        share = 0.1 + 0.8 * compress
        assert abs(whole_tokens(total, compress) - max(1, share * total)) <= 0.5 + 1e-9


def test_the_view_of_the_whole_takes_a_tenth_to_nine_tenths() -> None:
    assert WHOLE_SHARE == (0.1, 0.9)
    assert [whole_tokens(1000, compress) for compress in (0, 0.25, 0.5, 1)] == [100, 300, 500, 900]
    assert [whole_tokens(total, 0) for total in (1, 4, 20)] == [1, 1, 2]


@given(st.lists(scores, max_size=60))
def test_the_entropy_total_has_room_for_all_content_and_no_more(relevance: list[float]) -> None:
    result = entropy_total(np.array(relevance, np.float32))
    assert 1 <= result <= max(1, -(-10 * len(relevance) // 9))


@given(st.integers(1, 2000), st.floats(1 / 64, 1, width=32), st.integers(0, 50))
def test_equally_relevant_cells_all_count(cells: int, value: float, blank: int) -> None:
    """There is one token for each of them. These are nine tenths of the total; the rest shows the whole."""
    relevance = np.array([value] * cells + [0.0] * blank, np.float32)
    assert entropy_total(relevance) == -(-10 * cells // 9)


def test_one_peak_needs_one_token_beside_the_whole() -> None:
    assert entropy_total(np.array([1.0])) == 2
    assert entropy_total(np.array([1.0] + [0.0] * 99)) == 2
    assert entropy_total(np.array([1.0] + [0.001] * 15)) == 2
    assert entropy_total(np.zeros(16)) == entropy_total(np.zeros(0)) == 1


def test_entropy_total_by_hand() -> None:
    """Shares of 1/2, 1/4 and 1/4 have an entropy of 1.5 bits: 2.83 cells, or 3.14 with the whole."""
    assert entropy_total(np.array([0.5, 0.25, 0.25])) == 4
    assert entropy_total(np.array([[0.2, 0.1], [0.1, 0.0]], np.float32)) == 4


@given(st.lists(st.floats(1 / 64, 1, width=32), min_size=1, max_size=60), st.sampled_from((0.125, 0.5, 2.0)))
def test_the_entropy_total_depends_neither_on_order_nor_on_scale(
    relevance: list[float], scale: float
) -> None:
    values = np.array(relevance)
    result = entropy_total(values)
    assert entropy_total(values * scale) == result
    # Sums in another order may differ in their last bits.
    assert abs(entropy_total(values[::-1]) - result) <= 1


def test_the_entropy_total_grows_as_relevance_spreads() -> None:
    """It grows with each relevant cell among 16, and with the evenness of 100 cells."""
    result = [entropy_total(np.array([1.0] * many + [0.0] * (16 - many))) for many in range(1, 17)]
    assert result == [-(-10 * many // 9) for many in range(1, 17)]
    even = np.ones(100)
    sharper = [entropy_total(even + height * (np.arange(100) == 40)) for height in (0, 10, 100, 1000)]
    assert sharper == sorted(sharper, reverse=True)
    assert len(set(sharper)) == 4
