"""Rendezvous hashing: shares follow the weights, and a change moves only the keys that it must."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.gateway.backends.route import Orders, fraction, order, score

KEYS = [f"key-{number}" for number in range(4000)]
FOUR = [(f"b{number}", 1.0) for number in range(4)]


def shares(backends: list[tuple[str, float]]) -> Counter[str]:
    return Counter(order(key, backends)[0] for key in KEYS)


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 3, 4), (0.5, 8), (0.001, 1), (1000, 1000, 500)])
def test_shares_follow_the_weights(weights: tuple[float, ...]) -> None:
    given_weights = [(f"b{number}", float(weight)) for number, weight in enumerate(weights)]
    found, total = shares(given_weights), sum(weights)
    # The squared deviations in units of the expected number; with 3 degrees of freedom 99.9% are below 16.3.
    expected = {name: weight / total * len(KEYS) for name, weight in given_weights}
    assert sum((found[name] - each) ** 2 / each for name, each in expected.items()) < 16.3


@pytest.mark.parametrize("gone", range(4))
def test_only_the_keys_of_a_removed_backend_move(gone: int) -> None:
    left = [each for number, each in enumerate(FOUR) if number != gone]
    moved: Counter[str] = Counter()
    for key in KEYS:
        before, after = order(key, FOUR), order(key, left)
        if before[0] != after[0]:
            assert before[0] == f"b{gone}"
            assert after[0] == before[1]
            moved[after[0]] += 1
    assert 0.20 < moved.total() / len(KEYS) < 0.30
    assert min(moved.values()) > 0.25 * moved.total()  # they spread over all that stay


def test_keys_move_only_to_a_backend_that_is_added() -> None:
    five = [*FOUR, ("b4", 1.0)]
    moved = [after for key in KEYS if (after := order(key, five)[0]) != order(key, FOUR)[0]]
    assert set(moved) == {"b4"}
    assert 0.15 < len(moved) / len(KEYS) < 0.25


def test_more_weight_only_attracts() -> None:
    heavier = [("b0", 2.0), *FOUR[1:]]
    for key in KEYS[:500]:
        before, after = order(key, FOUR)[0], order(key, heavier)[0]
        assert after in (before, "b0")


@given(
    st.text(max_size=20),
    st.lists(st.tuples(st.text(min_size=1, max_size=5), st.floats(0.001, 1000)), max_size=8),
)
def test_an_order_has_every_backend_once_and_depends_on_no_order(
    key: str, backends: list[tuple[str, float]]
) -> None:
    unique = list(dict(backends).items())
    found = order(key, unique)
    assert sorted(found) == sorted(name for name, _ in unique)
    assert order(key, unique[::-1]) == found


def test_key_and_name_are_not_mixed_up() -> None:
    assert score("ab", "c", 1.0) != score("a", "bc", 1.0)
    assert score("\ud800", "c", 1.0) > 0


@pytest.mark.parametrize("hashed", [0, 1, 1 << 63, (1 << 64) - 1])
def test_a_hash_is_a_number_between_0_and_1(hashed: int) -> None:
    assert 0.0 < fraction(hashed) < 1.0


def test_remembered_orders_are_those_of_the_function() -> None:
    orders = Orders(most=3)
    for key in KEYS[:10] * 2:
        assert orders.order("m", key, FOUR, 1) == order(key, FOUR)
    assert orders.order("m", "key-9", FOUR[:2], 2) == order("key-9", FOUR[:2])
    assert orders.order("n", "key-9", FOUR[2:], 2) == order("key-9", FOUR[2:])
    assert orders.order("m", "key-9", FOUR, 1) == order("key-9", FOUR)


@given(st.text(max_size=8), st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=12))
def test_the_order_of_equal_weights_is_that_of_the_scores(key: str, names: set[str]) -> None:
    scores = {name: score(key, name, 3.0) for name in names}
    assert order(key, [(name, 3.0) for name in names]) == tuple(
        sorted(names, key=scores.__getitem__, reverse=True)
    )
