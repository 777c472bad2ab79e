"""Budgets: exact sums, no region beyond what it carries, content before blanks, and what each policy says."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fovea.relevance.attending import (
    LADDER,
    POLICIES,
    Levels,
    allocate,
    entropy_total,
    power,
    sharp,
    thresholds,
    thumbnail_tokens,
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
    levels = Levels.of(100)
    assert levels.steps == (0, 16, 64, 100)
    assert Levels.of(64).steps == (0, 16, 64)
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
    assert Levels.of(0).above(0) is None


@given(st.integers(1, 100_000))
def test_the_thumbnail_takes_a_fifth_at_most(total: int) -> None:
    assert 1 <= thumbnail_tokens(total) <= 64
    assert thumbnail_tokens(total) <= max(1, total / 5)


@given(st.lists(scores, min_size=1, max_size=60), st.integers(1, 5000))
def test_a_total_left_to_the_image_lies_in_its_range(worth: list[float], tokens: int) -> None:
    found = entropy_total(np.array(worth), tokens)
    assert max(1, round(tokens * 64 / 400)) <= found <= tokens or found == 1


def test_spread_relevance_asks_for_more() -> None:
    """One region of sixteen, then two, and so on to all: never less, and all of it in the end."""
    found = [entropy_total(np.array([1.0] * many + [0.0] * (16 - many)), 1000) for many in range(1, 17)]
    assert found == sorted(found)
    assert found[0] < 600
    assert found[-1] == 1000
    assert entropy_total(np.zeros(16), 1000) == 1000
    assert entropy_total(np.array([0.3]), 1000) == 1000
    sharper = [entropy_total(np.linspace(0, top, 16), 1000) for top in (0, 0.3, 0.6, 1.0)]
    assert sharper == sorted(sharper, reverse=True)
