"""Tests of the encoder-output cache: it is bounded in bytes, except for held outputs."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fovea.engine.cache.embeddings import EmbeddingCache
from tests.support.thorough import examples


def test_the_least_recently_used_output_is_evicted_first() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(20)
    cache.put("a", "A", 10, set())
    cache.put("b", "B", 10, set())
    assert cache.hold("a", "s")
    cache.release("a", "s")
    cache.put("c", "C", 10, set())
    assert ("a" in cache, "b" in cache, "c" in cache) == (True, False, True)
    assert (cache.bytes, cache.evictions, len(cache)) == (20, 1, 2)


def test_held_outputs_stay_above_the_ceiling_until_they_are_released() -> None:
    """The cache has room for one of two images.

    It has no hits then, but the sequences that read them can run.
    """
    cache: EmbeddingCache[str] = EmbeddingCache(10)
    cache.put("a", "A", 10, {"s"})
    cache.put("b", "B", 10, {"s"})
    assert (cache.get("a"), cache.get("b"), cache.bytes) == ("A", "B", 20)
    cache.release("a", "s")
    assert "a" not in cache
    cache.release("b", "s")
    assert "b" in cache
    cache.check_integrity(set())


def test_an_output_larger_than_the_cache_is_evicted_when_its_last_holder_releases_it() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(5)
    cache.put("big", "B", 50, {"one", "two"})
    cache.release("big", "one")
    assert cache.get("big") == "B"
    cache.release("big", "two")
    assert (len(cache), cache.bytes) == (0, 0)


def test_with_capacity_zero_only_held_outputs_stay() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(0)
    cache.put("a", "A", 1, set())
    assert "a" not in cache
    assert not cache.hold("a", "s")


def test_a_second_put_keeps_the_holders_and_counts_the_bytes_once() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(100)
    cache.put("a", "old", 10, {"one"})
    cache.put("a", "new", 30, {"two"})
    assert (cache.get("a"), cache.bytes) == ("new", 30)
    cache.drop("a")
    assert "a" in cache
    cache.release("a", "one")
    cache.release("a", "two")
    cache.drop("a")
    assert (len(cache), cache.bytes) == (0, 0)


def test_clearing_keeps_held_outputs() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(100)
    cache.put("held", "H", 1, {"s"})
    cache.put("loose", "L", 1, set())
    cache.clear()
    assert ("held" in cache, "loose" in cache) == (True, False)


def test_the_integrity_check_finds_a_holder_that_ended() -> None:
    cache: EmbeddingCache[str] = EmbeddingCache(100)
    cache.put("a", "A", 1, {"ghost"})
    cache.check_integrity({"ghost"})
    with pytest.raises(RuntimeError, match="held by sequences that ended"):
        cache.check_integrity(set())


KEYS = st.sampled_from("abcd")
HOLDERS = st.sampled_from(["s1", "s2", "s3"])


class EmbeddingMachine(RuleBasedStateMachine):
    """The cache against a dictionary of sizes and one of holders."""

    @initialize(capacity=st.integers(0, 30))
    def start(self, capacity: int) -> None:
        self.cache: EmbeddingCache[tuple[str, int]] = EmbeddingCache(capacity)
        self.holders: dict[str, set[str]] = {}
        self.sizes: dict[str, int] = {}

    @rule(key=KEYS, size=st.integers(1, 20), holders=st.sets(HOLDERS))
    def put(self, key: str, size: int, holders: set[str]) -> None:
        self.cache.put(key, (key, size), size, holders)
        self.sizes[key] = size
        self.holders[key] = self.holders.get(key, set()) | holders

    @rule(key=KEYS, holder=HOLDERS)
    def hold(self, key: str, holder: str) -> None:
        present = key in self.cache
        assert self.cache.hold(key, holder) == present
        if present:
            self.holders[key].add(holder)

    @rule(key=KEYS, holder=HOLDERS)
    def release(self, key: str, holder: str) -> None:
        self.cache.release(key, holder)
        self.holders.get(key, set()).discard(holder)

    @rule(key=KEYS)
    def drop(self, key: str) -> None:
        self.cache.drop(key)
        assert (key in self.cache) == bool(self.holders.get(key))

    @invariant()
    def bounded_and_without_loss(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity({"s1", "s2", "s3"})
        held = {key for key, holders in self.holders.items() if holders}
        for key in held:
            assert self.cache.get(key) == (key, self.sizes[key]), "a held output was lost"
        loose = sum(self.sizes[key] for key in self.sizes if key in self.cache and key not in held)
        assert self.cache.bytes <= self.cache.capacity or loose == 0


TestEmbeddingMachine = EmbeddingMachine.TestCase
TestEmbeddingMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
