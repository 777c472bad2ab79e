"""The store in memory: age, shares, scopes, and its ceiling under churn."""

from __future__ import annotations

import random
import tracemalloc

from fovea.gateway.cache.stores import ENTRY_BYTES, MemoryStore, store_key

KEY = "0" * 64


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def store(capacity: int = 1 << 20, share: float = 1.0, ttl_s: float = 10.0) -> tuple[MemoryStore, Clock]:
    clock = Clock()
    return MemoryStore(capacity, ttl_s=ttl_s, share=share, clock=clock), clock


async def test_a_value_ends_with_its_own_time() -> None:
    memory, clock = store(ttl_s=10)
    await memory.put("short", b"1", 3)
    await memory.put("long", b"2", 100)
    clock.now = 2.9
    assert await memory.get("short") == b"1"
    clock.now = 3.1
    assert await memory.get("short") is None
    assert await memory.get("long") == b"2"
    clock.now = 10.1
    assert await memory.get("long") is None
    assert memory.stats()["memory_entries"] == 0
    assert memory.stats()["memory_bytes"] == 0


async def test_the_least_recently_used_value_is_evicted_first() -> None:
    memory, _ = store(capacity=3 * (ENTRY_BYTES + 1))
    for key in "abc":
        await memory.put(key, b"x", 5)
    await memory.get("a")
    await memory.put("d", b"x", 5)
    assert [key for key in "abcd" if await memory.get(key)] == ["a", "c", "d"]
    assert memory.stats()["memory_evictions"] == 1


async def test_a_tenant_evicts_its_own_values_first() -> None:
    memory, _ = store(capacity=4 * (ENTRY_BYTES + 1), share=0.5)
    await memory.put("quiet", b"x", 5, owner="quiet")
    for number in range(20):
        await memory.put(f"busy {number}", b"x", 5, owner="busy")
    assert await memory.get("quiet") == b"x"
    assert memory.stats()["memory_entries"] == 3
    assert not await memory.put("large", b"x" * 2 * (ENTRY_BYTES + 1), 5, owner="busy")


async def test_a_value_that_does_not_fit_replaces_nothing_but_its_own_key() -> None:
    memory, _ = store(capacity=2 * ENTRY_BYTES)
    assert await memory.put("a", b"x", 5)
    assert not await memory.put("b", b"x" * 3 * ENTRY_BYTES, 5)
    assert await memory.get("a") == b"x"
    assert not await memory.put("a", b"x" * 3 * ENTRY_BYTES, 5)
    assert await memory.get("a") is None


async def test_clearing() -> None:
    memory, _ = store()
    for scope in ("tenant:a", "tenant:ab", "shared"):
        await memory.put(store_key(scope, KEY), b"x", 5)
    assert await memory.clear() == 3
    assert await memory.get(store_key("shared", KEY)) is None


async def test_its_ceiling_holds_for_the_real_memory() -> None:
    capacity, rng = 2 << 20, random.Random(1)
    memory, clock = store(capacity, share=0.4, ttl_s=50)
    tracemalloc.start()
    try:
        for number in range(6000):
            clock.now += 0.01
            size = rng.choice([1, 50, 500, 5000])
            key = store_key(f"tenant:{number % 7}", f"{rng.randrange(3000):064x}")
            await memory.put(key, bytes([1]) * size, rng.uniform(1, 60), owner=str(number % 7))
            assert memory.stats()["memory_bytes"] <= capacity
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert memory.stats()["memory_evictions"] > 100
    assert used <= 1.1 * capacity
