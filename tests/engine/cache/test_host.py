"""Tests of the host store: evictions and reads, ceilings, and expiry."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.cache.host import HostStore
from tests.support.disks import Clock
from tests.support.thorough import examples


def keep(store: HostStore[str], key: str, size: int = 10, created: float = 0.0) -> bool:
    return store.put(key, size, created, lambda: key.upper())


def test_the_least_recently_used_output_is_evicted_first() -> None:
    store: HostStore[str] = HostStore(20)
    assert keep(store, "a")
    assert keep(store, "b")
    assert store.get("a") == "A"
    assert keep(store, "c")
    assert ["a" in store, "b" in store, "c" in store] == [True, False, True]
    assert (store.stats().bytes, store.stats().entries, store.stats().evictions) == (20, 2, 1)
    assert store.get("b") is None
    assert (store.stats().hits, store.stats().misses) == (1, 1)


def test_a_stored_output_is_not_copied_again() -> None:
    store: HostStore[str] = HostStore(20)
    keep(store, "a")
    keep(store, "b")

    def never() -> str:
        raise AssertionError("the value was copied twice")

    assert store.put("a", 10, 0.0, never)
    keep(store, "c")
    assert "a" in store, "an eviction from the device counts as a use"


def test_an_output_that_is_too_large_is_dropped_and_evicts_none() -> None:
    store: HostStore[str] = HostStore(20)
    keep(store, "a")
    assert not keep(store, "big", size=21)
    assert ("a" in store, store.stats().drops) == (True, 1)


def test_room_is_reserved_before_the_copy_and_freed_if_the_copy_fails() -> None:
    store: HostStore[str] = HostStore(20)
    keep(store, "a")
    keep(store, "b")

    def fails() -> str:
        assert store.stats().bytes == 20
        raise MemoryError("no page left")

    with pytest.raises(MemoryError):
        store.put("c", 10, 0.0, fails)
    assert (store.stats().bytes, "c" in store) == (10, False)
    store.check_integrity()


def test_room_that_another_thread_reserved_is_not_used() -> None:
    store: HostStore[str] = HostStore(20)
    started, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        started.set()
        assert go_on.wait(20)
        return "A"

    thread = threading.Thread(target=store.put, args=("a", 15, 0.0, slow))
    thread.start()
    assert started.wait(20)
    assert not keep(store, "b")
    go_on.set()
    thread.join()
    assert ("a" in store, "b" in store, store.stats().drops) == (True, False, 1)


def test_age_counts_from_the_time_of_encoding() -> None:
    clock = Clock()
    store: HostStore[str] = HostStore(100, ttl_s=10, clock=clock)
    keep(store, "a", created=clock.now)
    keep(store, "b", created=clock.now - 5)
    assert not keep(store, "late", created=clock.now - 10)
    clock.now += 6
    assert ("a" in store, "b" in store) == (True, False)
    assert store.get("b") is None
    assert (store.stats().expirations, store.stats().bytes) == (1, 10)
    clock.now += 6
    store.sweep()
    assert (store.stats().expirations, store.stats().entries) == (2, 0)


KEYS = st.sampled_from("abcdef")
HOLDERS = st.sampled_from(["s1", "s2"])
TTL = 100.0


class TwoTiers(RuleBasedStateMachine):
    """A device tier that demotes outputs to a host tier, and requests that promote them from there.

    The model has only the times at which each output was encoded. Which outputs are evicted is left to the
    tiers. The test checks that no held output is lost, and that no wrong or stale output is returned.
    """

    @initialize(device=st.integers(0, 40), host=st.integers(0, 40), ages=st.booleans())
    def start(self, device: int, host: int, ages: bool) -> None:
        self.clock = Clock()
        self.ttl = TTL if ages else None
        self.host: HostStore[tuple[str, float]] = HostStore(host, ttl_s=self.ttl, clock=self.clock)
        self.device: EmbeddingCache[tuple[str, float]] = EmbeddingCache(
            device, ttl_s=self.ttl, on_evict=self.demote, clock=self.clock
        )
        self.created: dict[str, set[float]] = {}
        self.held: dict[str, set[str]] = {}
        self.demoted = 0

    def demote(self, key: str, value: tuple[str, float]) -> None:
        assert key not in self.device, "on_evict is called after the removal"
        self.demoted += 1
        self.host.put(key, self.size(key), value[1], lambda: value)

    def size(self, key: str) -> int:
        return 5 + ord(key) - ord("a")

    @rule(key=KEYS, holders=st.sets(HOLDERS))
    def encode(self, key: str, holders: set[str]) -> None:
        value = (key, self.clock())
        self.created.setdefault(key, set()).add(value[1])
        evictions, demoted = self.device.evictions, self.demoted
        self.device.put(key, value, self.size(key), holders)
        self.held[key] = self.held.get(key, set()) | holders
        assert self.demoted - demoted == self.device.evictions - evictions, "every eviction is reported"

    @rule(key=KEYS, holder=HOLDERS)
    def prepare_and_read(self, key: str, holder: str) -> None:
        """Look for an output as a request does: on the device, then in host memory. Hold the result."""
        if self.device.hold(key, holder):
            self.held[key].add(holder)
            return
        value = self.host.get(key)
        if value is None:
            return
        assert value[0] == key
        assert value[1] in self.created[key]
        assert self.ttl is None or self.clock.now - value[1] < self.ttl, "a stale output was returned"
        self.device.restore(key, value, self.size(key), holder, value[1])
        self.held.setdefault(key, set()).add(holder)
        assert self.device.get(key) == value

    @rule(key=KEYS, holder=HOLDERS)
    def release(self, key: str, holder: str) -> None:
        self.device.release(key, holder)
        self.held.get(key, set()).discard(holder)

    @rule(key=KEYS)
    def lose_one(self, key: str) -> None:
        self.device.drop(key)
        self.host.drop(key)
        assert key not in self.host

    @rule(device=st.booleans())
    def lose_all(self, device: bool) -> None:
        if device:
            self.device.clear()
        else:
            self.host.clear()
            assert self.host.stats().bytes == 0

    @rule(seconds=st.integers(1, 120))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "host"):
            return
        self.host.check_integrity()
        self.device.check_integrity({"s1", "s2"})
        assert self.host.stats().bytes <= self.host.capacity
        held = {key for key, holders in self.held.items() if holders}
        for key in held:
            assert self.device.get(key)[0] == key, "a held output was lost"
        loose = [key for key in self.device.keys if key not in held]
        assert self.device.bytes <= self.device.capacity or not loose


TestTwoTiers = TwoTiers.TestCase
TestTwoTiers.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
