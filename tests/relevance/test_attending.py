"""Budgets: exact sums, no region beyond what it carries, content before blanks, what each policy says, and the totals."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fovea.relevance.attending import (
    CONTINUOUS,
    LADDER,
    POLICIES,
    WHOLE_SHARE,
    Levels,
    allocate,
    entropy_total,
    power,
    sharp,
    thresholds,
    whole_tokens,
)

scores = st.floats(0, 1, width=32)
regions = st.lists(st.tuples(scores, st.integers(1, 500), st.integers(0, 500)), min_size=1, max_size=24)
totals = st.integers(0, 3000)
policies = st.sampled_from(sorted(POLICIES))


@given(regions, totals, policies, st.booleans())
def test_sums_are_exact_and_nobody_gets_more_than_it_carries(
    made: list[tuple[float, int, int]], total: int, policy: str, demanding: bool
) -> None:
    worth, natives, demands = (list(each) for each in zip(*made, strict=True))
    given_ = allocate(worth, natives, total, policy, demands if demanding else None)
    assert sum(given_) == min(total, sum(natives))
    assert all(0 <= tokens <= native for tokens, native in zip(given_, natives, strict=True))
    assert given_ == allocate(worth, natives, total, policy, demands if demanding else None)


@given(regions, totals, policies)
def test_content_is_served_before_blanks(made: list[tuple[float, int, int]], total: int, policy: str) -> None:
    """Nobody gets a blank token as long as somebody lacks one with content."""
    worth, natives, demands = (list(each) for each in zip(*made, strict=True))
    needed = [min(demand, native) for demand, native in zip(demands, natives, strict=True)]
    given_ = allocate(worth, natives, total, policy, demands)
    if any(tokens > need for tokens, need in zip(given_, needed, strict=True)):
        assert all(tokens >= need for tokens, need in zip(given_, needed, strict=True))


@given(st.lists(st.integers(1, 400), min_size=1, max_size=20), totals, policies)
def test_a_demand_for_all_is_no_demand(natives: list[int], total: int, policy: str) -> None:
    worth = np.linspace(0, 1, len(natives)).astype(np.float32)
    assert allocate(worth, natives, total, policy) == allocate(worth, natives, total, policy, natives)


@given(st.integers(1, 30), st.integers(1, 400), totals, policies)
def test_among_equals_the_earlier_has_at_least_as_much(
    count: int, native: int, total: int, policy: str
) -> None:
    found = allocate([0.5] * count, [native] * count, total, policy)
    assert list(found) == sorted(found, reverse=True)


@given(st.lists(scores, min_size=2, max_size=20), st.integers(1, 400), totals, policies)
def test_of_equal_regions_the_more_relevant_has_at_least_as_much(
    worth: list[float], native: int, total: int, policy: str
) -> None:
    found = allocate(worth, [native] * len(worth), total, policy)
    ordered = [tokens for _, tokens in sorted(zip(worth, found, strict=True), key=lambda pair: -pair[0])]
    distinct = len(set(worth)) == len(worth)
    assert not distinct or ordered == sorted(ordered, reverse=True)


def test_the_documents_thresholds() -> None:
    worth = np.array([0, 0.24, 0.25, 0.49, 0.5, 0.74, 0.75, 1])
    assert LADDER == (16, 64, 200, 400)
    assert thresholds(worth, np.full(8, 1000)).tolist() == [16, 16, 64, 64, 200, 200, 400, 400]
    assert thresholds(worth, np.full(8, 64)).tolist() == [16, 16, 64, 64, 64, 64, 64, 64]


def test_power_between_64_and_400_of_400() -> None:
    worth = np.array([0.0, 0.5, 1.0])
    assert power(worth, np.full(3, 400)) == pytest.approx([64, 64 + 336 * 0.5**4.02, 400])
    assert power(worth, np.full(3, 100)) == pytest.approx([16, 16 + 84 * 0.5**4.02, 100])
    assert power(worth, np.full(3, 400), exponent=1.0) == pytest.approx([64, 232, 400])
    assert power(worth, np.full(3, 400), offset=9.0)[0] == pytest.approx(64 + 336 * 0.3, rel=1e-6)
    assert power(worth, np.full(3, 400), offset=-9.0)[1] == 64


def test_sharp_gives_all_to_the_most_relevant() -> None:
    """What does not suffice for another whole region goes to the next ones by levels."""
    assert not sharp(np.ones(3), np.full(3, 64)).any()
    assert allocate([0.2, 0.9, 0.5], [64, 64, 64], 128, "sharp") == (0, 64, 64)
    assert allocate([0.2, 0.9, 0.5], [64, 64, 64], 100, "sharp") == (16, 64, 20)


def test_where_the_wishes_are_the_total_they_are_granted() -> None:
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


@given(regions, totals, st.sampled_from(sorted(set(POLICIES) - CONTINUOUS)))
def test_policies_of_levels_leave_them_in_one_region_at_most(
    made: list[tuple[float, int, int]], total: int, policy: str
) -> None:
    """That one takes what remains of the total."""
    worth, natives, _ = (list(each) for each in zip(*made, strict=True))
    given_ = allocate(worth, natives, total, policy)
    between = [tokens for tokens, native in zip(given_, natives, strict=True) if tokens not in Levels.for_region(native).steps]  # fmt: skip
    assert len(between) <= 1


def test_power_gives_any_number_of_tokens() -> None:
    """84 is what the power gives to 0.5; the policies of levels would make it 64."""
    assert frozenset({"power"}) == CONTINUOUS
    assert allocate([0.0, 0.5, 1.0], [400] * 3, 64 + 84 + 400, "power") == (64, 84, 400)
    worth = [0.6, 0.7, 0.8, 0.9]
    wishes = tuple(int(want) for want in power(np.array(worth), np.full(4, 400)))
    assert not set(wishes) & set(LADDER)
    assert allocate(worth, [400] * 4, sum(wishes), "power") == wishes


@given(st.integers(1, 100_000), st.floats(0, 1), st.floats(0, 1))
def test_the_whole_takes_more_the_more_is_to_be_compressed(total: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 1 <= whole_tokens(total, low) <= whole_tokens(total, high) <= total
    for compress in (low, high):
        share = 0.1 + 0.8 * compress
        assert abs(whole_tokens(total, compress) - max(1, share * total)) <= 0.5 + 1e-9


def test_from_a_tenth_to_nine_tenths_for_the_whole() -> None:
    assert WHOLE_SHARE == (0.1, 0.9)
    assert [whole_tokens(1000, compress) for compress in (0, 0.25, 0.5, 1)] == [100, 300, 500, 900]
    assert [whole_tokens(total, 0) for total in (1, 4, 20)] == [1, 1, 2]


@given(st.lists(scores, max_size=60))
def test_a_total_left_to_the_image_has_room_for_all_its_content_and_no_more(worth: list[float]) -> None:
    found = entropy_total(np.array(worth, np.float32))
    assert 1 <= found <= max(1, -(-10 * len(worth) // 9))


@given(st.integers(1, 2000), st.floats(1 / 64, 1, width=32), st.integers(0, 50))
def test_cells_that_are_worth_the_same_all_count(cells: int, value: float, blank: int) -> None:
    """As many tokens as there are of them, which is nine tenths: the rest shows the whole."""
    worth = np.array([value] * cells + [0.0] * blank, np.float32)
    assert entropy_total(worth) == -(-10 * cells // 9)


def test_one_peak_asks_for_one_token_beside_the_whole() -> None:
    assert entropy_total(np.array([1.0])) == 2
    assert entropy_total(np.array([1.0] + [0.0] * 99)) == 2
    assert entropy_total(np.array([1.0] + [0.001] * 15)) == 2
    assert entropy_total(np.zeros(16)) == entropy_total(np.zeros(0)) == 1


def test_sharing_by_hand() -> None:
    """Shares of a half and two quarters: an entropy of one and a half bits, so 2.83 cells, of 0.9."""
    assert entropy_total(np.array([0.5, 0.25, 0.25])) == 4
    assert entropy_total(np.array([[0.2, 0.1], [0.1, 0.0]], np.float32)) == 4


@given(st.lists(st.floats(1 / 64, 1, width=32), min_size=1, max_size=60), st.sampled_from((0.125, 0.5, 2.0)))
def test_neither_order_nor_scale_of_worth_counts(worth: list[float], scale: float) -> None:
    values = np.array(worth)
    found = entropy_total(values)
    assert entropy_total(values * scale) == found
    # Sums in another order differ in their last bits.
    assert abs(entropy_total(values[::-1]) - found) <= 1


def test_spread_relevance_asks_for_more() -> None:
    """One region of sixteen, then two, and so on to all: more each time; and the more even, the more."""
    found = [entropy_total(np.array([1.0] * many + [0.0] * (16 - many))) for many in range(1, 17)]
    assert found == [-(-10 * many // 9) for many in range(1, 17)]
    even = np.ones(100)
    sharper = [entropy_total(even + height * (np.arange(100) == 40)) for height in (0, 10, 100, 1000)]
    assert sharper == sorted(sharper, reverse=True)
    assert len(set(sharper)) == 4
