"""Budgets of regions: exact sums, more for the more relevant, content before blank cells, and the totals."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from fovea.relevance.attending import (
    LADDER,
    POLICIES,
    WHOLE_SHARE,
    Policy,
    Scores,
    allocate,
    entropy_total,
    find_cut,
    sharp,
    thresholds,
    whole_tokens,
)
from tests.relevance.division import assert_more_for_the_more_relevant
from tests.support.thorough import examples

scores = st.floats(0, 1, width=32)
regions = st.lists(st.tuples(scores, st.integers(1, 500), st.integers(0, 500)), min_size=1, max_size=24)
totals = st.integers(0, 3000)
policies = st.sampled_from(sorted(POLICIES))


def curved(scores: Scores) -> NDArray[np.float64]:
    """A policy with any shares: the square of the score."""
    return np.square(scores.astype(np.float64))


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


@settings(max_examples=examples(400))
@given(regions, st.floats(0, 1), st.sampled_from((*sorted(POLICIES), curved)))
def test_a_more_relevant_region_is_shown_at_least_as_well(
    cases: list[tuple[float, int, int]], share: float, policy: str | Policy
) -> None:
    """Tokens per cell with content never grow as relevance falls, but for the rounding to whole tokens.

    A less relevant region once got the remainder, because all of its cells fitted into it.
    """
    relevance, natives, demands = (list(each) for each in zip(*cases, strict=True))
    budgets = allocate(relevance, natives, round(share * sum(natives)), policy, demands)
    assert_more_for_the_more_relevant(relevance, natives, demands, budgets)


@settings(max_examples=examples(200))
@given(regions, st.floats(0, 1), st.sampled_from((*sorted(POLICIES), curved)))
def test_only_the_most_relevant_that_can_take_it_get_more_than_their_target(
    cases: list[tuple[float, int, int]], share: float, policy: str | Policy
) -> None:
    relevance, natives, demands = (list(each) for each in zip(*cases, strict=True))
    needs = np.minimum(demands, natives)
    budgets = allocate(relevance, natives, round(share * sum(natives)), policy, demands)
    targets = (policy if callable(policy) else POLICIES[policy])(np.array(relevance, np.float32)) * needs
    order = sorted(range(len(cases)), key=lambda index: (-np.float32(relevance[index]), index))
    for place, region in enumerate(order):
        if budgets[region] > targets[region] + 1e-6:
            assert all(budgets[more] >= needs[more] for more in order[:place])


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
    """The levels are shares of 200 tokens; the highest asks for more than all of them."""
    relevance = np.array([0, 0.24, 0.25, 0.49, 0.5, 0.74, 0.75, 1])
    assert LADDER == (16, 64, 200, 400)
    assert thresholds(relevance).tolist() == [0.08, 0.08, 0.32, 0.32, 1, 1, 1, 1]
    assert thresholds(relevance / 4).tolist() == thresholds(relevance).tolist()
    assert thresholds(np.zeros(2)).tolist() == [1, 1]


def test_sharp_gives_all_to_the_most_relevant() -> None:
    """The remainder goes to the next region."""
    assert not sharp(np.ones(3)).any()
    assert allocate([0.2, 0.9, 0.5], [64, 64, 64], 128, "sharp") == (0, 64, 64)
    assert allocate([0.2, 0.9, 0.5], [64, 64, 64], 100, "sharp") == (0, 64, 36)


def test_levels_are_shares_of_each_regions_own_content() -> None:
    """A level once was a number of tokens: with 64 each, a small region was shown better than a large one."""
    assert allocate([0.1, 0.3, 0.4, 0.9], [100, 25, 200, 50], 50 + 64 + 8 + 8) == (8, 8, 64, 50)
    demands = [50, 100, 200]
    assert allocate([0.3, 0.4, 1.0], [400] * 3, 200 + 32 + 16, demands=demands) == (16, 32, 200)
    assert allocate([0.3, 0.4, 1.0], [400] * 3, 200 + 84 + 16, demands=demands) == (16, 84, 200)


def test_targets_are_met_in_the_order_of_relevance() -> None:
    assert allocate([0.9, 0.8, 0.1], [64, 64, 64], 128 + 15) == (64, 64, 15)
    assert allocate([0.9, 0.8, 0.1], [64, 64, 64], 80) == (64, 16, 0)
    assert allocate([0.9, 0.8, 0.7], [64, 64, 64], 7) == (7, 0, 0)


def test_the_remainder_goes_to_the_most_relevant_that_can_take_it() -> None:
    """The case of examples/page.png: the second region once got 144 tokens, the text's region 55."""
    scores, natives, demands = [0.48, 0.27, 0.239, 0.24], [192, 144, 128, 96], [37, 9, 17, 16]
    assert allocate(scores, natives, 232, demands=demands) == (190, 9, 17, 16)
    assert allocate(scores, natives, 240, demands=demands) == (192, 15, 17, 16)


def test_a_policy_of_ones_own_gives_any_share() -> None:
    assert allocate([0.0, 0.5, 1.0], [400] * 3, 500, curved) == (0, 100, 400)
    assert allocate([0.0, 0.5, 1.0], [400] * 3, 510, curved) == (0, 110, 400)


def test_the_part_to_cut_out_of_a_region_that_is_too_large() -> None:
    """The rest of the region keeps its target, so the part takes what is above that."""
    assert find_cut([0.9, 0.5], [100, 50], [100, 50]) == (0, 0)
    assert find_cut([0.4, 0.9], [50, 100], [0, 60]) == (1, 60)
    assert find_cut([0.4, 0.9], [50, 100], [20, 100], "sharp") == (0, 20)
    assert find_cut([0.4, 1.0], [100, 100], [66, 100]) == (0, 50), "50 natively, and 16 for the other 50"
    assert find_cut([0.4, 1.0], [100, 100], [20, 100]) == (0, 0), "the target of 32 is not met"


@pytest.mark.parametrize("policy", [*sorted(POLICIES), pytest.param(curved, id="curved")])
def test_a_part_that_is_cut_out_is_native(policy: str | Policy) -> None:
    """With the part and the rest as two regions, the same total shows the part at native resolution."""
    cuts = 0
    for total in range(1, 600):
        index, cells = find_cut(
            [1.0, 0.4, 0.1], [200] * 3, allocate([1.0, 0.4, 0.1], [200] * 3, total, policy), policy
        )
        if cells:
            scores, natives = [1.0, 0.4, 0.1], [200] * 3
            scores[index : index + 1], natives[index : index + 1] = [scores[index]] * 2, [cells, 200 - cells]
            assert allocate(scores, natives, total, policy)[index] == cells
            cuts += 1
    assert cuts > 300


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
