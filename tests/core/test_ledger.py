"""Tests of the ledger: bytes, ages and the order of eviction, also against a naive model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fovea.core.ledger import Ledger
from tests.support.thorough import examples


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    ledger: Ledger[str, str] = Ledger(30)
    for name in "abc":
        ledger.add(name, name, 10)
    ledger.touch("a")
    ledger.add("d", "d", 10)
    assert [key for key, _ in ledger.evict()] == ["b"]
    assert list(ledger) == ["c", "a", "d"]
    assert (ledger.bytes, ledger.evictions) == (30, 1)


def test_an_entry_of_the_same_key_is_replaced_and_counted_once() -> None:
    ledger: Ledger[str, int] = Ledger(100)
    ledger.add("a", 1, 10)
    ledger.add("a", 2, 30)
    assert (ledger.get("a"), ledger.bytes, len(ledger)) == (2, 30, 1)
    entry = ledger.remove("a")
    assert entry is not None
    assert entry.value == 2
    assert ledger.remove("a") is None
    assert ledger.bytes == 0


def test_a_pinned_entry_stays_when_it_is_stale_and_above_the_ceiling() -> None:
    clock, pinned = Clock(), {"a"}
    ledger: Ledger[str, str] = Ledger(5, ttl_s=10, clock=clock, is_pinned=pinned.__contains__)
    ledger.add("a", "a", 10)
    assert ledger.evict() == []
    clock.now = 10
    assert ledger.expire() == []
    assert ledger.fresh("a") is None
    ledger.clear()
    assert "a" in ledger
    pinned.clear()
    assert ledger.expire() == ["a"]
    assert (ledger.bytes, ledger.evictions, ledger.expirations) == (0, 0, 1)


def test_a_rank_replaces_the_order_of_use() -> None:
    ledger: Ledger[str, int] = Ledger(2, rank=lambda value: value)
    for name, value in (("a", 3), ("b", 1), ("c", 2)):
        ledger.add(name, value, 1)
    assert [key for key, _ in ledger.evict()] == ["b"]
    assert [key for key, _ in ledger.evict(0)] == ["c", "a"]


def test_reserved_bytes_count_and_are_never_evicted() -> None:
    ledger: Ledger[str, str] = Ledger(10)
    ledger.reserve(8)
    ledger.add("a", "a", 4)
    assert [key for key, _ in ledger.evict()] == ["a"]
    assert ledger.bytes == 8
    ledger.check_integrity("the store")
    ledger.unreserve(8)
    assert ledger.bytes == 0


def test_the_age_of_an_entry_counts_from_its_creation() -> None:
    """Outputs that are read from the disk keep the time at which they were encoded."""
    clock = Clock()
    clock.now = 100
    ledger: Ledger[str, str] = Ledger(100, ttl_s=10, clock=clock)
    ledger.add("new", "new", 1)
    ledger.add("old", "old", 1, created=91)
    clock.now = 101
    assert ledger.expire() == ["old"]


def test_a_wrong_count_is_found() -> None:
    ledger: Ledger[str, str] = Ledger(100)
    ledger.add("a", "a", 10)
    ledger.bytes += 1
    with pytest.raises(RuntimeError, match="the store: the byte count is 11, the entries have 10"):
        ledger.check_integrity("the store")


@dataclass
class Naive:
    """The naive model of the ledger: a list in order of use."""

    entries: list[tuple[str, int, float]]

    def evict(self, room: int) -> None:
        while self.entries and sum(size for _, size, _ in self.entries) > room:
            self.entries.pop(0)

    def expire(self, oldest: float) -> None:
        self.entries = [entry for entry in self.entries if entry[2] > oldest]


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("abcdef"), st.integers(0, 9)),
    st.tuples(st.just("touch"), st.sampled_from("abcdef"), st.just(0)),
    st.tuples(st.just("remove"), st.sampled_from("abcdef"), st.just(0)),
    st.tuples(st.just("wait"), st.just(""), st.integers(1, 5)),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(ACTIONS, max_size=200))
def test_it_agrees_with_a_naive_account(actions: list[tuple[str, str, int]]) -> None:
    clock, naive = Clock(), Naive([])
    ledger: Ledger[str, str] = Ledger(25, ttl_s=8, clock=clock)
    for action, key, amount in actions:
        if action == "wait":
            clock.now += amount
        elif action == "add":
            ledger.add(key, key, amount)
            naive.entries = [entry for entry in naive.entries if entry[0] != key] + [(key, amount, clock.now)]
        elif action == "remove":
            ledger.remove(key)
            naive.entries = [entry for entry in naive.entries if entry[0] != key]
        elif key in ledger:
            ledger.touch(key)
            naive.entries.sort(key=lambda entry: entry[0] == key)
        ledger.expire()
        naive.expire(clock.now - 8)
        ledger.evict()
        naive.evict(25)
        assert list(_rows(ledger)) == naive.entries
        ledger.check_integrity("it")


def _rows(ledger: Ledger[str, str]) -> Iterator[tuple[str, int, float]]:
    for key in ledger:
        entry = ledger.entry(key)
        assert entry is not None
        yield key, entry.size, entry.created
