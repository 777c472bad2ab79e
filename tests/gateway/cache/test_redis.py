"""The store in a real Redis: times, restarts, kills, stops, damaged values, and bounds."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from fovea.gateway.cache.redis import PREFIX, RedisStore
from fovea.gateway.cache.stores import LayeredStore, MemoryStore, store_key
from tests.support.redis_process import RedisProcess, redis

__all__ = ["redis"]

KEY, OTHER = store_key("tenant:a", "1" * 64), store_key("tenant:b", "2" * 64)
LONG = b"an answer of many words " * 500


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A store, a second client that looks into Redis, and the clock of the store's pauses."""

    def __init__(self, server: RedisProcess, **options: int) -> None:
        self.clock = Clock()
        self.server = server
        self.raw = Redis.from_url(server.url)
        self.store = RedisStore(server.url, timeout_s=0.2, clock=self.clock, **options)

    async def get(self, key: str) -> bytes | None:
        found = await self.store.fetch(key)
        return None if found is None else found.value

    async def until_it_answers(self) -> None:
        """Let pauses pass until a put succeeds."""
        for _ in range(50):
            self.clock.now += 10
            if await self.store.put(KEY, b"back", 60):
                return
        raise AssertionError("the store does not connect again")

    async def aclose(self) -> None:
        await self.store.aclose()
        await self.raw.aclose()


@pytest.fixture
async def bench(redis: RedisProcess) -> AsyncIterator[Bench]:
    made = Bench(redis)
    try:
        yield made
    finally:
        redis.send(signal.SIGCONT)
        await made.aclose()


@pytest.mark.parametrize("value", [b"", b"short", LONG, os.urandom(5000)], ids=len)
async def test_values_come_back_as_they_were(bench: Bench, value: bytes) -> None:
    assert await bench.get(KEY) is None
    assert await bench.store.put(KEY, value, 60)
    assert await bench.get(KEY) == value
    assert await bench.get(OTHER) is None
    assert await bench.raw.strlen(PREFIX + KEY) < max(len(value) // 4, 100) or value not in (LONG,)


async def test_values_end_with_their_time(bench: Bench) -> None:
    await bench.store.put(KEY, b"x", 60)
    assert 50_000 < await bench.raw.pttl(PREFIX + KEY) <= 60_000
    await bench.store.put(KEY, b"x", 0.02)
    await asyncio.sleep(0.05)
    assert await bench.get(KEY) is None


async def test_a_damaged_foreign_or_moved_value_is_a_miss_and_deleted(bench: Bench) -> None:
    await bench.store.put(KEY, LONG, 60)
    good = await bench.raw.get(PREFIX + KEY)
    damaged = [good[:-1], good + b"x", b"x" + good[1:], good[:40] + b"\0\0" + good[42:], b"", b"foreign" * 9]
    for value in damaged:
        await bench.raw.set(PREFIX + KEY, value)
        assert await bench.get(KEY) is None
        assert not await bench.raw.exists(PREFIX + KEY)
    await bench.raw.set(PREFIX + OTHER, good)
    assert await bench.get(OTHER) is None
    await bench.raw.lpush(PREFIX + KEY, "a list")
    assert await bench.get(KEY) is None
    assert await bench.store.put(KEY, b"x", 60)
    assert bench.store.stats()["redis_damaged"] == len(damaged) + 1
    assert bench.store.stats()["redis_failing"] == 0


async def test_a_value_that_is_too_large_is_not_stored(redis: RedisProcess) -> None:
    bench = Bench(redis, most_value_bytes=100)
    assert not await bench.store.put(KEY, b"x" * 101, 60)
    assert await bench.store.put(KEY, b"x" * 100, 60)
    assert bench.store.stats()["redis_skipped"] == 1
    await bench.aclose()


async def test_clearing_leaves_what_others_have_in_redis(bench: Bench) -> None:
    for number in range(50):
        await bench.store.put(store_key("tenant:a", str(number)), b"x", 60)
    await bench.store.put(OTHER, b"x", 60)
    await bench.raw.set("somebody else's", b"x")
    assert await bench.store.clear() == 51
    assert await bench.raw.keys() == [b"somebody else's"]


async def test_a_killed_redis_is_a_miss_and_comes_back(bench: Bench) -> None:
    await bench.store.put(KEY, b"x", 60)
    bench.server.kill()
    for _ in range(100):
        assert await bench.get(KEY) is None
        assert not await bench.store.put(KEY, b"x", 60)
    stats = bench.store.stats()
    assert (stats["redis_failures"], stats["redis_outages"], stats["redis_failing"]) == (1, 1, 1)
    bench.server.start()
    assert await bench.get(KEY) is None, "it asked again before its pause was over"
    await bench.until_it_answers()
    assert await bench.get(KEY) == b"back"
    assert bench.store.stats()["redis_failing"] == 0


async def test_a_kill_in_the_middle_of_a_run_loses_answers_and_nothing_else(bench: Bench) -> None:
    async def client(number: int) -> None:
        for turn in range(40):
            key = store_key("s", f"{number} {turn % 5}")
            found = await bench.get(key)
            assert found in (None, key.encode())
            await bench.store.put(key, key.encode(), 60)
            if number == 0 and turn == 10:
                bench.server.kill()
            if number == 0 and turn == 20:
                bench.server.start()
            bench.clock.now += 0.1

    async with asyncio.timeout(30):
        await asyncio.gather(*(client(number) for number in range(20)))
    await bench.until_it_answers()
    assert bench.store.stats()["redis_outages"] >= 1


async def test_a_stopped_redis_costs_one_timeout_for_all(bench: Bench) -> None:
    await bench.store.put(KEY, b"x", 60)
    bench.server.send(signal.SIGSTOP)
    # Far more requests than connections: without a deadline that includes the wait for one, this takes long.
    async with asyncio.timeout(10):
        assert await asyncio.gather(*(bench.get(KEY) for _ in range(100))) == [None] * 100
    failures = bench.store.stats()["redis_failures"]
    assert failures <= 100
    for _ in range(1000):
        assert await bench.get(KEY) is None
    assert bench.store.stats()["redis_failures"] == failures
    bench.server.send(signal.SIGCONT)
    await bench.until_it_answers()
    assert await bench.get(KEY) == b"back"


async def test_a_cancelled_call_does_not_mix_up_answers(bench: Bench) -> None:
    for number in range(20):
        await bench.store.put(store_key("s", str(number)), str(number).encode(), 60)
    for _ in range(20):
        tasks = [asyncio.create_task(bench.get(store_key("s", str(number)))) for number in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(value in (None, str(n).encode()) for n, value in enumerate(found) if n % 2)
    assert await bench.get(store_key("s", "7")) == b"7"


async def test_a_full_redis_is_read_and_not_written(bench: Bench) -> None:
    await bench.store.put(KEY, b"x", 60)
    await bench.raw.config_set("maxmemory", "1")
    assert not await bench.store.put(OTHER, b"x", 60)
    assert await bench.get(KEY) == b"x"
    assert bench.store.stats()["redis_refused"] == 1
    assert bench.store.stats()["redis_failing"] == 0


async def test_puts_stop_while_redis_uses_too_much_memory(redis: RedisProcess) -> None:
    async with Redis.from_url(redis.url) as client:
        used = (await client.info("memory"))["used_memory"]
    bench = Bench(redis, most_bytes=used + 2_000_000)
    stored = [await bench.store.put(KEY, b"x", 60)]
    await bench.raw.setrange("ballast", 5_000_000, b"x")
    stored.append(await bench.store.put(KEY, b"x", 60))
    bench.clock.now += 11
    stored.append(await bench.store.put(KEY, b"x", 60))
    await bench.raw.delete("ballast")
    bench.clock.now += 11
    stored.append(await bench.store.put(KEY, b"x", 60))
    assert stored == [True, True, False, True]
    await bench.aclose()


async def test_memory_in_front_of_redis(bench: Bench) -> None:
    near = MemoryStore(1 << 20, ttl_s=60, clock=bench.clock)
    first = LayeredStore(near, bench.store, near_ttl_s=5)
    second = LayeredStore(MemoryStore(1 << 20, ttl_s=60, clock=bench.clock), bench.store, near_ttl_s=5)
    await first.put(KEY, b"x", 60)
    assert await second.get(KEY) == b"x"
    read = second.stats()["redis_read_bytes"]
    assert await second.get(KEY) == b"x"
    assert second.stats()["redis_read_bytes"] == read
    bench.server.kill()
    assert await second.get(KEY) == b"x"
    bench.clock.now += 6
    assert await second.get(KEY) is None
    await second.put(OTHER, b"y", 60)
    assert await second.get(OTHER) == b"y"
    await second.clear()
    assert await second.get(OTHER) is None


async def test_nothing_connects_before_it_is_used() -> None:
    store = RedisStore("redis://127.0.0.1:1/0")
    assert store.stats()["redis_failures"] == 0
    await store.aclose()
