"""Encoded regions: bytes within the ceiling, and the least relevant gone first, against a plain list."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.engine.cache.regions import RegionCache

Step = tuple[str, int, int, int]


@dataclass
class Entry:
    key: str
    size: int
    relevance: float


class Naive:
    """A list, the one used last at its end."""

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
def test_against_a_plain_list(capacity: int, steps: list[Step]) -> None:
    cache: RegionCache[str] = RegionCache(capacity)
    naive = Naive(capacity)
    found = 0
    for kind, number, worth, size in steps:
        key, relevance = f"region {number}", worth / 4
        if kind == "get":
            known = naive.get(key, relevance)
            assert cache.get(key, relevance) == (f"encoded {key}" if known else None)
            found += known
        else:
            naive.put(key, size, relevance)
            cache.put(key, f"encoded {key}", size, relevance)
        cache.check_integrity()
        assert {entry.key for entry in naive.entries} == {
            f"region {n}" for n in range(7) if f"region {n}" in cache
        }
        assert (len(cache), cache.bytes) == (len(naive.entries), sum(entry.size for entry in naive.entries))
    asked = [kind for kind, *_ in steps].count("get")
    assert (cache.hits, cache.misses) == (found, asked - found)


def test_a_margin_leaves_and_what_questions_were_about_stays() -> None:
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


def test_old_questions_count_half_as_much_each_time() -> None:
    """0.5, then 0.5 + 0.25: more than 0.7 once."""
    cache: RegionCache[str] = RegionCache(20)
    cache.put("twice", "a", 10, 0.5)
    cache.get("twice", 0.5)
    cache.put("once", "b", 10, 0.7)
    cache.put("new", "c", 10, 0.9)
    assert "twice" in cache
    assert "once" not in cache


def test_what_is_larger_than_the_ceiling_is_not_kept_and_costs_no_other() -> None:
    """To make room for it everything else left first, and then it left as well."""
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


def test_a_lost_count_is_told() -> None:
    cache: RegionCache[str] = RegionCache(10)
    cache.put("a", "a", 5, 0.2)
    cache._ledger.bytes = 4
    with pytest.raises(RuntimeError, match="lost count of its bytes"):
        cache.check_integrity()
    cache._ledger.bytes, cache._ledger.capacity = 5, 4
    with pytest.raises(RuntimeError, match="5 bytes of regions are stored, and 4 are allowed"):
        cache.check_integrity()


def test_old_regions_are_misses_and_gone() -> None:
    """However they were used: `embed_ttl_s` bounds how long anything of an image is kept."""
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
