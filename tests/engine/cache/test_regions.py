"""Tests of the region cache: the ceiling, and the order of eviction, also against a naive model."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.engine.cache.embeddings import RegionCache

Step = tuple[str, int, int, int]


@dataclass
class Entry:
    key: str
    size: int
    relevance: float


class Naive:
    """The naive model of the cache: a list in order of use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: list[Entry] = []

    def find(self, key: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.key == key), None)

    def get(self, key: str, relevance: float) -> bool:
        entry = self.find(key)
        if entry is None:
            return False
        entry.relevance = relevance + entry.relevance / 2
        self.entries.remove(entry)
        self.entries.append(entry)
        return True

    def put(self, key: str, size: int, relevance: float) -> None:
        self.entries = [entry for entry in self.entries if entry.key != key]
        if size <= self.capacity:
            self.entries.append(Entry(key, size, relevance))
        while sum(entry.size for entry in self.entries) > self.capacity:
            self.entries.remove(min(self.entries, key=lambda entry: entry.relevance))


STEPS = st.lists(
    st.tuples(st.sampled_from(["get", "put"]), st.integers(0, 6), st.integers(0, 4), st.integers(1, 40)),
    max_size=60,
)


@given(st.integers(0, 100), STEPS)
def test_it_agrees_with_a_naive_cache(capacity: int, steps: list[Step]) -> None:
    cache: RegionCache[str] = RegionCache(capacity)
    naive = Naive(capacity)
    hits = 0
    for kind, number, quarters, size in steps:
        key, relevance = f"region {number}", quarters / 4
        if kind == "get":
            present = naive.get(key, relevance)
            assert cache.get(key, relevance) == (f"encoded {key}" if present else None)
            hits += present
        else:
            naive.put(key, size, relevance)
            cache.put(key, f"encoded {key}", size, relevance)
        cache.check_integrity()
        assert {entry.key for entry in naive.entries} == {
            f"region {n}" for n in range(7) if f"region {n}" in cache
        }
        assert (len(cache), cache.bytes) == (len(naive.entries), sum(entry.size for entry in naive.entries))
    reads = [kind for kind, *_ in steps].count("get")
    assert (cache.hits, cache.misses) == (hits, reads - hits)


def test_the_least_relevant_region_is_evicted_first() -> None:
    cache: RegionCache[str] = RegionCache(30)
    cache.put("total", "a", 10, 0.9)
    cache.put("margin", "b", 10, 0.1)
    cache.put("heading", "c", 10, 0.5)
    cache.put("table", "d", 10, 0.6)
    assert [key for key in ("total", "margin", "heading", "table") if key in cache] == [
        "total",
        "heading",
        "table",
    ]
    assert cache.evictions == 1


def test_an_earlier_question_counts_half_as_much_as_the_next() -> None:
    """Relevance 0.5 twice is 0.5 + 0.25, which is more than 0.7 once."""
    cache: RegionCache[str] = RegionCache(20)
    cache.put("twice", "a", 10, 0.5)
    cache.get("twice", 0.5)
    cache.put("once", "b", 10, 0.7)
    cache.put("new", "c", 10, 0.9)
    assert "twice" in cache
    assert "once" not in cache


def test_a_region_larger_than_the_ceiling_is_not_stored_and_evicts_none() -> None:
    """Before, all other regions were evicted to make room for it, and then it was evicted as well."""
    cache: RegionCache[str] = RegionCache(10)
    cache.put("small", "a", 5, 0.2)
    cache.put("huge", "b", 11, 0.9)
    assert "small" in cache
    assert "huge" not in cache
    cache.check_integrity()


def test_clearing_keeps_the_counts() -> None:
    cache: RegionCache[str] = RegionCache(10)
    cache.put("a", "a", 5, 0.2)
    assert cache.get("a", 0.1) == "a"
    cache.clear()
    assert cache.get("a", 0.1) is None
    assert (len(cache), cache.bytes, cache.hits, cache.misses) == (0, 0, 1, 1)


def test_a_wrong_count_raises_an_error() -> None:
    cache: RegionCache[str] = RegionCache(10)
    cache.put("a", "a", 5, 0.2)
    cache._ledger.bytes = 4
    with pytest.raises(RuntimeError, match="the byte count is"):
        cache.check_integrity()
    cache._ledger.bytes, cache._ledger.capacity = 5, 4
    with pytest.raises(RuntimeError, match="5 bytes of regions are stored, and 4 are allowed"):
        cache.check_integrity()


def test_stale_regions_are_misses_and_are_removed() -> None:
    """Uses do not extend the time: `embed_ttl_s` bounds how long any data of an image is stored."""
    now = [0.0]
    cache: RegionCache[str] = RegionCache(30, ttl_s=10, clock=lambda: now[0])
    cache.put("a", "a", 5, 0.2)
    now[0] = 9.0
    assert cache.get("a", 0.1) == "a"
    cache.put("b", "b", 5, 0.2)
    assert cache.peek("a") == "a"
    now[0] = 10.0
    assert cache.peek("a") is None
    assert "a" not in cache
    assert cache.get("a", 0.1) is None
    assert (len(cache), cache.bytes, cache.evictions) == (1, 5, 0)
    cache.check_integrity()
