"""Values within a ceiling in bytes and a time to live, against a model that looks at everything every time."""

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
    """The same by looking through a list, the least recently used first: (name, value, size, end)."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, float]] = []
        self.evictions = 0

    def put(self, name: int, value: int, size: int, now: float) -> bool:
        self.drop(name)
        if size > CAPACITY:
            return False
        self.rows = [row for row in self.rows if row[3] > now]
        self.rows.append((name, value, size, now + TTL))
        while sum(row[2] for row in self.rows) > CAPACITY:
            self.rows.pop(0)
            self.evictions += 1
        return True

    def find(self, name: int, now: float) -> int | None:
        found = [row for row in self.rows if row[0] == name and row[3] > now]
        self.drop(name)
        self.rows += found
        return found[0][1] if found else None

    def drop(self, name: int) -> bool:
        before = len(self.rows)
        self.rows = [row for row in self.rows if row[0] != name]
        return len(self.rows) < before


@given(STEPS)
def test_it_holds_what_the_model_holds_and_never_more_than_its_ceiling(
    steps: list[tuple[str, int, int]],
) -> None:
    now = 0.0
    cache: ByteCache[int, int] = ByteCache(CAPACITY, TTL, lambda: now)
    model = Model()
    for value, (what, name, size) in enumerate(steps):
        if what == "put":
            assert cache.put(name, value, size) == model.put(name, value, size + ENTRY_BYTES, now)
        elif what == "find":
            assert cache.find(name) == model.find(name, now)
        elif what == "drop":
            assert cache.drop(name) == model.drop(name)
        elif what == "wait":
            now += name
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


def test_without_a_time_to_live_only_room_counts() -> None:
    now = 0.0
    cache: ByteCache[str, int] = ByteCache(10_000, 0, lambda: now)
    assert cache.put("a", 1, 1)
    now = 1e12
    assert cache.find("a") == 1


def test_what_is_too_old_goes_and_is_counted_once() -> None:
    now = 0.0
    cache: ByteCache[str, int] = ByteCache(10_000, 5, lambda: now)
    for name in "abc":
        cache.put(name, 1, 1)
    now = 5.0
    assert cache.find("a") is None
    cache.put("d", 1, 1)
    assert (len(cache), cache.expirations, cache.evictions) == (1, 3, 0)


def test_no_capacity_keeps_nothing() -> None:
    cache: ByteCache[str, int] = ByteCache(0)
    assert not cache.put("a", 1, 0)
    assert (len(cache), cache.bytes) == (0, 0)


def test_an_old_value_does_not_outlive_one_that_was_too_large() -> None:
    cache: ByteCache[str, int] = ByteCache(1000)
    cache.put("a", 1, 10)
    assert not cache.put("a", 2, 5000)
    assert cache.find("a") is None
