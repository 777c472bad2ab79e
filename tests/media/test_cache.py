"""ByteCache compared with a naive model that scans a list at every call."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from fovea.media.cache import ENTRY_BYTES, ByteCache

CAPACITY = 3 * ENTRY_BYTES + 100
TTL = 5.0

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 6), st.integers(0, ENTRY_BYTES)),
        st.tuples(st.just("find"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


class Model:
    """A naive cache: a list of (key, value, size, expiry), the least recently used first."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, float]] = []
        self.evictions = 0

    def put(self, key: int, value: int, size: int, now: float) -> bool:
        self.drop(key)
        if size > CAPACITY:
            return False
        self.rows = [row for row in self.rows if row[3] > now]
        self.rows.append((key, value, size, now + TTL))
        while sum(row[2] for row in self.rows) > CAPACITY:
            self.rows.pop(0)
            self.evictions += 1
        return True

    def find(self, key: int, now: float) -> int | None:
        alive = [row for row in self.rows if row[0] == key and row[3] > now]
        self.drop(key)
        self.rows += alive
        return alive[0][1] if alive else None

    def drop(self, key: int) -> bool:
        before = len(self.rows)
        self.rows = [row for row in self.rows if row[0] != key]
        return len(self.rows) < before


@given(STEPS)
def test_it_equals_the_model_and_stays_within_its_ceiling(
    steps: list[tuple[str, int, int]],
) -> None:
    now = 0.0
    cache: ByteCache[int, int] = ByteCache(CAPACITY, TTL, lambda: now)
    model = Model()
    for value, (what, key, size) in enumerate(steps):
        if what == "put":
            assert cache.put(key, value, size) == model.put(key, value, size + ENTRY_BYTES, now)
        elif what == "find":
            assert cache.find(key) == model.find(key, now)
        elif what == "drop":
            assert cache.drop(key) == model.drop(key)
        elif what == "wait":
            now += key
        else:
            cache.clear()
            model.rows = []
        assert 0 <= cache.bytes <= CAPACITY
        assert cache.evictions == model.evictions
    alive = [row for row in model.rows if row[3] > now]
    assert cache.stats("x") == {
        "x_bytes": sum(row[2] for row in alive),
        "x_capacity_bytes": CAPACITY,
        "x_entries": len(alive),
        "x_hits": 0,
        "x_misses": 0,
        "x_evictions": model.evictions,
        "x_expired": cache.expirations,
    }


def test_without_a_time_to_live_entries_do_not_expire() -> None:
    now = 0.0
    cache: ByteCache[str, int] = ByteCache(10_000, 0, lambda: now)
    assert cache.put("a", 1, 1)
    now = 1e12
    assert cache.find("a") == 1


def test_expired_entries_are_dropped_and_counted_once() -> None:
    now = 0.0
    cache: ByteCache[str, int] = ByteCache(10_000, 5, lambda: now)
    for key in "abc":
        cache.put(key, 1, 1)
    now = 5.0
    assert cache.find("a") is None
    cache.put("d", 1, 1)
    assert (len(cache), cache.expirations, cache.evictions) == (1, 3, 0)


def test_a_cache_without_capacity_stores_nothing() -> None:
    cache: ByteCache[str, int] = ByteCache(0)
    assert not cache.put("a", 1, 0)
    assert (len(cache), cache.bytes) == (0, 0)


def test_a_value_that_is_too_large_removes_the_old_value_of_its_key() -> None:
    cache: ByteCache[str, int] = ByteCache(1000)
    cache.put("a", 1, 10)
    assert not cache.put("a", 2, 5000)
    assert cache.find("a") is None
