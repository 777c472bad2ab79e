"""A real Redis that is killed, stopped, or loses what it knew."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from fovea.core.errors import Overloaded, Unavailable
from fovea.gateway.tenants.accounts import Accounts, open_accounts
from fovea.gateway.tenants.keys import TenantLimits
from fovea.gateway.tenants.redis_store import Batches
from fovea.gateway.tenants.shared import THRESHOLD
from fovea.gateway.usage.prices import Amounts
from tests.gateway.tenants.support import admitted, settings, text
from tests.support.servers import RedisServer

DAILY = TenantLimits(text_tokens_per_day=1000)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.gateway.tenants.shared.FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr("fovea.gateway.tenants.shared.LONGEST_PAUSE_S", 0.05)


def open_redis(server: RedisServer, **values: Any) -> Accounts:
    return open_accounts(settings(server.url, **{"on_failure": "local", **values}))


async def until(accounts: Accounts, **expected: float) -> None:
    """Wait until the figures have these values."""
    while any(accounts.stats()[name] != value for name, value in expected.items()):
        await asyncio.sleep(0.01)


async def test_keys_have_lifetimes_and_stay_together_in_a_cluster(redis_server: RedisServer) -> None:
    accounts = open_redis(redis_server)
    await accounts.reserve("keys", DAILY, text(1))
    client = redis.asyncio.Redis.from_url(redis_server.url)
    names = sorted(await client.keys("fovea:{keys}:*"))
    assert names == [b"fovea:{keys}:account", b"fovea:{keys}:leases"]
    assert [0 < await client.ttl(name) <= 32 * 86_400 for name in names] == [True, True]
    await client.aclose()
    await accounts.aclose()


async def test_scripts_that_redis_forgot_are_sent_again(redis_server: RedisServer) -> None:
    accounts = open_redis(redis_server)
    client = redis.asyncio.Redis.from_url(redis_server.url)
    first = await accounts.reserve("scripts", DAILY, text(400))
    await client.script_flush()
    await accounts.settle(first, text(300))
    await client.script_flush()
    assert len(await admitted(accounts, "scripts", DAILY, text(701), text(700))) == 1
    assert accounts.stats()["failures"] == 0
    await client.aclose()
    await accounts.aclose()


async def test_a_killed_redis_widens_no_limit(own_redis: RedisServer) -> None:
    """Redis dies with all it knew. The budget of the day counts on: before, during, and after."""
    accounts = open_redis(own_redis)
    first = await admitted(accounts, "alice", DAILY, *[text(100)] * 4)
    own_redis.kill()
    second = await admitted(accounts, "alice", DAILY, *[text(100)] * 3)
    assert accounts.stats()["failing"] == 1
    assert (await admitted(accounts, "alice", DAILY, text(301))) == []
    await accounts.settle(first[0], text(50))
    assert len(first + second) == 7
    own_redis.start()
    await until(accounts, failing=0, pending=0)
    usage = await accounts.usage("alice", DAILY)
    assert usage.in_flight == 6, "requests in flight are registered again"
    third = await admitted(accounts, "alice", DAILY, *[text(100)] * 10)
    assert len(third) == 3
    for reservation in (*first, *second, *third):
        await accounts.settle(reservation, text(10))
    await until(accounts, pending=0)
    usage = await accounts.usage("alice", DAILY)
    assert usage.in_flight == 0
    assert usage.day_used[1] == 10 * 9 + 100, "what was settled while Redis had lost the lease stays reserved"
    await accounts.aclose()


async def test_a_redis_without_its_data_is_told_before_the_next_request(own_redis: RedisServer) -> None:
    """A gateway without requests in flight restores accounts, too, and another gateway sees them."""
    old, new = open_redis(own_redis, on_failure="refuse"), open_redis(own_redis)
    reservation = await old.reserve("alice", DAILY, text(500))
    await old.settle(reservation, text(600))
    own_redis.kill()
    for _ in range(THRESHOLD):
        with pytest.raises(Unavailable):
            await old.reserve("alice", DAILY, text(1))
    own_redis.start()
    await until(old, failing=0, pending=0)
    assert (await new.usage("alice", DAILY)).day_used == (1, 600, 0, 0)
    for accounts in (old, new):
        await accounts.aclose()


async def test_two_gateways_admit_half_each_while_redis_is_down(own_redis: RedisServer) -> None:
    """A Redis that lost its data is told again what both gateways know."""
    both = [open_redis(own_redis, sharers=2) for _ in range(2)]
    for accounts in both:
        assert len(await admitted(accounts, "alice", DAILY, *[text(100)] * 2)) == 2
        await accounts.usage("alice", DAILY)
    await both[0].usage("alice", DAILY)
    own_redis.kill()
    alone = [len(await admitted(accounts, "alice", DAILY, *[text(100)] * 9)) for accounts in both]
    assert alone == [3, 3], "each has half of what is left of the day"
    own_redis.start()
    for accounts in both:
        await until(accounts, failing=0, pending=0)
    assert (await both[0].usage("alice", DAILY)).day_used[1] == 1000
    assert await admitted(both[1], "alice", DAILY, text(1)) == []
    for accounts in both:
        await accounts.aclose()


async def test_memory_stays_bounded_over_20_000_requests(own_redis: RedisServer) -> None:
    accounts = open_redis(own_redis, pending=100)
    limits = TenantLimits(text_tokens_per_day=10**9, max_in_flight=400)
    held = await admitted(accounts, "alice", limits, *[text(1)] * 300)
    own_redis.kill()
    for number in range(20_000):
        reservation = await accounts.reserve("alice", limits, text(2))
        await accounts.settle(reservation, text(1))
        if number < 300:
            await accounts.settle(held[number], text(0))
    stats = accounts.stats()
    assert stats["pending"] <= 100
    assert stats["dropped"] >= 200
    assert stats["fallbacks"] == 20_000
    assert stats["failures"] < 100, "the store is not tried by every request"
    own_redis.start()
    await until(accounts, failing=0, pending=0)
    usage = await accounts.usage("alice", limits)
    assert usage.in_flight == 0
    assert usage.day_used[1] == 20_000 + 300, "dropped ends leave what was reserved"
    await accounts.aclose()


async def test_a_redis_that_hangs_delays_few_requests(own_redis: RedisServer) -> None:
    """It accepts connections and never answers. Only the first requests wait, for the timeout."""
    accounts = open_redis(own_redis, timeout_s=0.5)
    limits = TenantLimits(text_tokens_per_day=10**6)
    held = await admitted(accounts, "alice", limits, text(5))
    own_redis.pause()
    for _ in range(50):
        held += await admitted(accounts, "alice", limits, text(5))
    assert len(held) == 51
    assert accounts.stats()["fallbacks"] == 50
    waits = accounts.stats()["failures"]
    assert THRESHOLD <= waits < 25
    for reservation in held:
        await accounts.settle(reservation, text(1))
    own_redis.resume()
    await until(accounts, failing=0, pending=0)
    usage = await accounts.usage("alice", limits)
    assert (usage.day_used, usage.in_flight) == ((51, 51, 0, 0), 0), (
        "also what Redis took late was given back"
    )
    await accounts.aclose()


async def test_refusing_while_redis_is_down(own_redis: RedisServer) -> None:
    accounts = open_redis(own_redis, on_failure="refuse")
    held = await admitted(accounts, "alice", DAILY, text(900))
    own_redis.kill()
    for _ in range(5):
        with pytest.raises(
            Unavailable, match="accounts cannot be read at present, so limits cannot be checked"
        ):
            await accounts.reserve("alice", DAILY, text(1))
    with pytest.raises(Unavailable):
        await accounts.usage("alice", DAILY)
    await accounts.settle(held[0], text(1))
    assert (await accounts.reserve("bob", TenantLimits(), text(1))).settled, "no limits need no store"
    own_redis.start()
    await until(accounts, failing=0, pending=0)
    with pytest.raises(Overloaded):
        await accounts.reserve("alice", DAILY, text(101))
    await accounts.aclose()


async def test_a_part_that_is_too_small_is_not_the_fault_of_the_request(own_redis: RedisServer) -> None:
    accounts = open_redis(own_redis, sharers=4)
    own_redis.kill()
    for _ in range(4):
        with pytest.raises(Unavailable, match="this gateway admits its part only: the request needs 251"):
            await accounts.reserve("alice", DAILY, Amounts(0, 251))
    assert len(await admitted(accounts, "alice", DAILY, *[text(250)] * 2)) == 1
    await accounts.aclose()


@pytest.mark.parametrize("answer", [b"1 \xff 3", b"1 birth 12", b"1 birth" + 13 * b" x", None])
async def test_an_answer_that_was_damaged_on_the_way_is_a_failure_of_the_store(
    answer: bytes | None, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request once failed with it, and the settlement was lost."""
    accounts, tenant = open_redis(redis_server), f"damaged-{answer!r}".encode().hex()
    before = await accounts.reserve(tenant, DAILY, text(400))

    async def damaged(*_: object) -> bytes | None:
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Batches, "call", damaged)
        await accounts.settle(before, text(300))
        during = await accounts.reserve(tenant, DAILY, text(100))
        await accounts.settle(during, text(100))
        assert accounts.stats()["failures"] >= 1
    await until(accounts, failing=0, pending=0)
    assert len(await admitted(accounts, tenant, DAILY, text(601), text(600))) == 1
    await accounts.aclose()
