"""Budgets of regions: exact sums, needs first, shares by relevance, and content before blank cells."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from fovea.relevance.attending import STEEPNESS, WHOLE_SHARE, allocate, find_cut, whole_tokens
from tests.relevance.division import assert_more_for_the_more_relevant, assert_needs_come_first
from tests.support.thorough import examples

Case = tuple[float, int, int, int]
scores = st.floats(0, 1, width=32)
regions = st.lists(
    st.tuples(scores, st.integers(1, 500), st.integers(0, 500), st.one_of(st.just(0), st.integers(0, 500))),
    min_size=1,
    max_size=24,
)
"""Score, native tokens, tokens with content, and need of each region."""
totals = st.integers(0, 3000)


def columns(cases: list[Case]) -> tuple[list[float], list[int], list[int], list[int]]:
    relevance, natives, demands, needs = (list(each) for each in zip(*cases, strict=True))
    return relevance, natives, demands, needs


@given(regions, totals, st.booleans(), st.booleans())
def test_sums_are_exact_and_no_region_exceeds_its_native_tokens(
    cases: list[Case], total: int, demanding: bool, asked: bool
) -> None:
    relevance, natives, demands, needs = columns(cases)
    options = demands if demanding else None, needs if asked else None
    budgets = allocate(relevance, natives, total, *options)
    assert sum(budgets) == min(total, sum(natives))
    assert all(0 <= tokens <= native for tokens, native in zip(budgets, natives, strict=True))
    assert budgets == allocate(relevance, natives, total, *options)


@given(regions, totals)
def test_content_comes_before_blank_cells(cases: list[Case], total: int) -> None:
    """No region gets a blank token before every region has a token for each of its cells with content."""
    relevance, natives, demands, needs = columns(cases)
    wanted = [min(demand, native) for demand, native in zip(demands, natives, strict=True)]
    budgets = allocate(relevance, natives, total, demands, needs)
    if any(tokens > want for tokens, want in zip(budgets, wanted, strict=True)):
        assert all(tokens >= want for tokens, want in zip(budgets, wanted, strict=True))


@settings(max_examples=examples(400))
@given(regions, st.floats(0, 1))
def test_needs_come_first_and_then_relevance(cases: list[Case], share: float) -> None:
    """Tokens per cell with content never grow as relevance falls, but for the rounding to whole tokens.

    A less relevant region once got the remainder, because all of its cells fitted into it.
    """
    relevance, natives, demands, needs = columns(cases)
    budgets = allocate(relevance, natives, round(share * sum(natives)), demands, needs)
    wanted = [min(demand, native) for demand, native in zip(demands, natives, strict=True)]
    assert_needs_come_first(wanted, needs, budgets)
    assert_more_for_the_more_relevant(relevance, natives, demands, needs, budgets)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=20), totals)
def test_demands_for_all_tokens_and_no_needs_change_nothing(natives: list[int], total: int) -> None:
    relevance = np.linspace(0, 1, len(natives)).astype(np.float32)
    result = allocate(relevance, natives, total)
    assert result == allocate(relevance, natives, total, natives)
    assert result == allocate(relevance, natives, total, natives, [0] * len(natives))


@given(st.integers(1, 30), st.integers(1, 400), st.floats(1 / 64, 1, width=32), totals)
def test_equal_regions_get_equal_shares_and_the_earlier_get_the_remainder(
    count: int, native: int, score: float, total: int
) -> None:
    """All of the remainder, up to a token for each of the others, once went to the first region."""
    result = allocate([score] * count, [native] * count, total)
    assert list(result) == sorted(result, reverse=True)
    assert result[0] - result[-1] <= 1


near = st.floats(0.0625, 1, width=32)


@settings(max_examples=examples(200))
@given(near, st.floats(0.98, 1), st.integers(1, 400), st.lists(st.tuples(near, st.integers(1, 400))), totals)
def test_regions_of_nearly_equal_relevance_get_nearly_equal_shares(
    score: float, ratio: float, native: int, others: list[tuple[float, int]], total: int
) -> None:
    """Within 2% of the relevance, a region gets at least 0.92 of the other's tokens, but for the rounding."""
    relevance = [score, score * ratio, *(each for each, _ in others)]
    more, less, *_ = allocate(relevance, [native, native, *(size for _, size in others)], total)
    assert more >= less >= 0.98**STEEPNESS * (more - 1) - 1


@given(st.lists(scores, min_size=2, max_size=20), st.integers(1, 400), totals)
def test_among_regions_of_equal_size_the_more_relevant_gets_at_least_as_much(
    relevance: list[float], native: int, total: int
) -> None:
    result = allocate(relevance, [native] * len(relevance), total)
    ordered = [tokens for _, tokens in sorted(zip(relevance, result, strict=True), key=lambda pair: -pair[0])]
    distinct = len(set(relevance)) == len(relevance)
    assert not distinct or ordered == sorted(ordered, reverse=True)


def test_shares_grow_with_the_fourth_power_of_relevance() -> None:
    """Half of the relevance is a sixteenth of the share: 80 of 100 tokens, and 5 of 100."""
    assert STEEPNESS == 4
    assert allocate([1.0, 0.5], [100, 100], 85) == (80, 5)
    assert allocate([0.2, 0.1], [100, 100], 85) == (80, 5), "only the ratio counts"
    assert allocate([1.0, 0.5], [100, 200], 90) == (80, 10), "a share is one of the region's own content"
    assert allocate([1.0, 0.5], [400, 400], 85, [100, 100]) == (80, 5)


def test_a_region_with_all_of_its_content_leaves_the_rest_to_the_others() -> None:
    """The second region gets what the first has no content for, and blank cells come last."""
    assert allocate([1.0, 0.5], [100, 100], 150) == (100, 50)
    assert allocate([1.0, 0.5], [100, 100], 70, [40, 20]) == (50, 20)
    assert allocate([1.0, 0.5], [100, 100], 130, [40, 20]) == (100, 30)


def test_needs_are_met_before_the_shares() -> None:
    assert allocate([1.0, 0.5], [100, 100], 100, needs=[0, 20]) == (80, 20)
    assert allocate([1.0, 0.5], [100, 100], 20, needs=[0, 20]) == (0, 20)
    assert allocate([1.0, 0.5], [100, 100], 30, needs=[25, 20]) == (25, 5)
    assert allocate([1.0, 0.5], [100, 100], 85, needs=[30, 2]) == (80, 5), "a need is no limit"


def test_a_need_is_not_more_than_the_content() -> None:
    assert allocate([1.0, 0.5], [100, 100], 60, [50, 50], [0, 90]) == (10, 50)


def test_the_remainder_of_rounding_goes_to_the_most_relevant() -> None:
    assert allocate([0.9, 0.9], [100, 100], 101) == (51, 50)
    assert allocate([0.9] * 20, [100] * 20, 19) == (*[1] * 19, 0)
    assert allocate([0.5, 0.9, 0.9], [64, 64, 64], 1) == (0, 1, 0)


def test_regions_without_relevance_come_last_and_one_after_the_other() -> None:
    assert allocate([0.0, 1.0, 0.0], [10, 10, 10], 25) == (10, 10, 5)
    assert allocate([0.0, 0.0], [10, 10], 12) == (10, 2)


def test_the_region_to_cut_is_the_most_relevant_with_less_than_its_need() -> None:
    assert find_cut([0.9, 0.5], [100, 50], [100, 50]) == (0, 0)
    assert find_cut([0.4, 0.9], [50, 100], [0, 60]) == (1, 60)
    assert find_cut([0.4, 0.9], [50, 100], [20, 100]) == (0, 20)
    assert find_cut([0.9, 0.4, 0.4], [0, 50, 50], [10, 20, 10]) == (1, 20), "among equal ones the earlier"
    assert find_cut([0.9, 0.4], [0, 0], [0, 0]) == (0, 0), "no region is asked about"


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
