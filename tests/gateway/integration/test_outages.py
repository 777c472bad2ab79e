"""Redis is killed and comes back while the gateway runs."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from fovea.gateway.settings import AccountSettings, ResponseCacheSettings
from tests.gateway.support import FakeEngine, Running, running, soon
from tests.support.servers import RedisServer

KEY = "fovea-key-of-a-test-that-is-long-enough"
HEADERS = {"authorization": f"Bearer {KEY}"}


def keys_file(folder: Path, **limits: int) -> Path:
    """A keys file of one tenant with limits."""
    path = folder / "keys.toml"
    lines = [f"{name} = {value}" for name, value in limits.items()]
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path.write_text("\n".join(["[[key]]", 'name = "alice"', f'hash = "sha256:{digest}"', *lines, ""]))
    path.chmod(0o600)
    return path


async def ask(gateway: Running, text: str = "hello", **body: Any) -> Any:
    return await gateway.ask(text, headers=HEADERS, **body)


async def test_answers_go_on_without_the_cache_and_are_found_again_later(own_redis: RedisServer) -> None:
    """Each gateway has a small memory of its own, so another gateway shows what Redis holds."""
    cache = ResponseCacheSettings(response_cache_near_ttl_s=0.1, response_cache_redis_timeout_ms=500)
    given: Any = {"redis": own_redis.url, "response_cache": cache}
    async with FakeEngine("e") as engine, running(engine, **given) as one, running(engine, **given) as two:
        assert (await one.ask(temperature=0)).headers["x-fovea-cache"] == "miss"
        await soon(lambda: _hits(two))

        own_redis.kill()
        await asyncio.sleep(0.15)
        answers = await asyncio.gather(
            *(gateway.ask(str(n), temperature=0) for n in range(6) for gateway in (one, two))
        )
        assert {answer.status_code for answer in answers} == {200}
        assert len(engine.received) >= 7

        own_redis.start()
        await soon(lambda: _hits(one, "again"))
        await soon(lambda: _hits(two, "again"))


async def _hits(gateway: Running, text: str = "hello") -> bool:
    answer = await gateway.ask(text, temperature=0)
    assert answer.status_code == 200
    return bool(answer.headers["x-fovea-cache"] == "hit")


@pytest.mark.parametrize("on_failure", ["refuse", "local"])
async def test_limits_hold_as_configured_while_their_store_is_away(
    on_failure: str, own_redis: RedisServer, tmp_path: Path
) -> None:
    """Ten requests a day: three before the outage. Of two sharers, each admits half of the day meanwhile."""
    accounts = AccountSettings(
        accounts=own_redis.url, accounts_on_failure=on_failure, accounts_sharers=2, accounts_timeout_s=1.0
    )
    given: Any = {"accounts": accounts, "keys_file": keys_file(tmp_path, requests_per_day=10)}
    async with FakeEngine("e") as engine, running(engine, **given) as gateway:
        assert (await gateway.ask()).status_code == 401
        for number in range(3):
            assert (await ask(gateway, str(number))).status_code == 200
        own_redis.kill()
        during = [await ask(gateway, f"during {number}") for number in range(10)]
        counts = {
            status: sum(answer.status_code == status for answer in during) for status in (200, 429, 503)
        }
        if on_failure == "refuse":
            assert counts == {200: 0, 429: 0, 503: 10}
            for answer in during:
                assert_tells_no_store(answer, str(own_redis.url).removeprefix("redis://"))
        else:
            assert counts[503] == 0
            assert 1 <= counts[200] <= 5
            refused = next(answer for answer in during if answer.status_code == 429)
            assert int(refused.headers["retry-after"]) >= 1
        own_redis.start()
        await soon(lambda: _is_admitted(gateway))
    assert len(engine.received) <= 11


def assert_tells_no_store(answer: httpx.Response, where: str) -> None:
    """Assert that a refusal has the request's id, and neither the address of the store nor its failure."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "accounts_unavailable")
    assert error["message"] == (
        "accounts cannot be read at present, so limits cannot be checked; try again later (request "
        f"{answer.headers['x-request-id']})"
    )
    assert where not in answer.text + str(answer.headers)


async def test_a_locked_file_of_accounts_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "accounts.db"
    accounts = AccountSettings(accounts=f"sqlite:{path}", accounts_timeout_s=0.05)
    given: Any = {"accounts": accounts, "keys_file": keys_file(tmp_path, requests_per_day=10)}
    async with FakeEngine("e") as engine, running(engine, **given) as gateway:
        assert (await ask(gateway)).status_code == 200
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            refused = [await ask(gateway, f"during {number}") for number in range(5)]
            other.execute("ROLLBACK")
        for answer in refused:
            assert_tells_no_store(answer, str(tmp_path))
        first = refused[0].headers["x-request-id"]
        assert f"request {first} of alice: {path} gave no answer in 0.05 s" in caplog.messages
        await soon(lambda: _is_admitted(gateway))


async def _is_admitted(gateway: Running) -> bool:
    """Whether the store is asked again: Redis has forgotten the day, so there is room."""
    return bool((await ask(gateway, "after")).status_code == 200)


async def test_a_redis_that_hangs_delays_requests_little_and_loses_none(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    accounts = AccountSettings(accounts=own_redis.url, accounts_on_failure="local", accounts_timeout_s=0.1)
    cache = ResponseCacheSettings(response_cache_redis_timeout_ms=100)
    given: Any = {
        "accounts": accounts, "keys_file": keys_file(tmp_path, requests_per_day=1000), "redis": own_redis.url,
        "response_cache": cache,
    }  # fmt: skip
    async with FakeEngine("e") as engine, running(engine, **given) as gateway:
        assert (await ask(gateway)).status_code == 200
        own_redis.pause()
        try:
            for number in range(10):
                assert (await ask(gateway, str(number), temperature=0)).status_code == 200
        finally:
            own_redis.resume()
        assert (await ask(gateway, "last")).status_code == 200
    assert len(engine.received) == 12
