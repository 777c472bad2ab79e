"""The response cache as the data path uses it: plans, hits in both forms, bypasses, and waiting requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from fovea.core.errors import ConfigError
from fovea.core.media import content_identity
from fovea.gateway.cache.answers import events
from fovea.gateway.cache.cache import Hit, ResponseCache, open_cache
from fovea.gateway.cache.key import MEDIA_MARK, Plan
from fovea.gateway.cache.stores import MemoryStore
from fovea.gateway.settings import ResponseCacheSettings
from tests.gateway.cache.answers import answer, sent
from tests.support.redis_process import RedisProcess, redis

__all__ = ["redis"]

CAT = content_identity("image/png", 8, 8, b"cat")
SETTINGS = ResponseCacheSettings()


def request(text: str = "What is it?", **fields: Any) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": f"{MEDIA_MARK}0"}},
        {"type": "text", "text": text},
    ]
    return {"model": "m", "messages": [{"role": "user", "content": parts}], "temperature": 0, **fields}


def streamed(**options: bool) -> dict[str, Any]:
    return request(stream=True, **({"stream_options": options} if options else {}))


class Backend:
    """A cache, and a backend that answers what it does not have. calls: answers of the backend so far."""

    def __init__(self, settings: ResponseCacheSettings = SETTINGS, *, store: Any = None) -> None:
        self.now = 1000.0
        store = store or MemoryStore(1 << 20, ttl_s=3600, clock=lambda: self.now)
        self.cache = ResponseCache(store, settings, wall=lambda: self.now)
        self.calls = 0
        self.answer = answer()
        self.status = 200
        self.gate = asyncio.Event()
        self.gate.set()

    def plan(self, body: Mapping[str, Any], *, tenant: str = "a", image: str = CAT, **options: Any) -> Plan:
        return self.cache.plan(body, [image], tenant=tenant, model_version="m@1", **options)

    async def ask(self, body: Mapping[str, Any], **options: Any) -> bytes:
        """Answer a request as the data path does."""
        plan = self.plan(body, **options)
        hit = await self.cache.lookup(plan)
        if hit is not None:
            return hit.payload()
        with self.cache.record(plan) as recorder:
            self.calls += 1
            parts = self._parts(body)
            for data in parts[:1]:
                recorder.feed(data)
            await self.gate.wait()
            for data in parts[1:]:
                recorder.feed(data)
            recorder.finish(self.status)
        await self.stored()
        return b"".join(parts)

    async def stored(self) -> None:
        """Wait until nothing is being recorded."""
        while self.cache.stats()["recording_bytes"]:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _parts(self, body: Mapping[str, Any]) -> list[bytes]:
        if body.get("stream"):
            options = body.get("stream_options") or {}
            return events(self.answer, include_usage=options.get("include_usage") is True)
        data = json.dumps(self.answer).encode()
        return [data[:10], data[10:]]


USAGE = streamed(include_usage=True)


@pytest.mark.parametrize(
    ("first", "second", "calls"),
    [
        (request(), request(), 1),
        (request(), streamed(), 1),
        (request(), USAGE, 1),
        (USAGE, request(), 1),
        (USAGE, streamed(), 1),
        (streamed(), streamed(), 1),
        # A stream without token counts cannot become an answer with them.
        (streamed(), request(), 2),
        (streamed(), USAGE, 2),
    ],
)
async def test_each_form_comes_from_either(first: Any, second: Any, calls: int) -> None:
    backend = Backend()
    await backend.ask(first)
    expected = b"".join(backend._parts(second))
    found = await backend.ask(second)
    assert backend.calls == calls
    assert found == expected or json.loads(found) == json.loads(expected)


async def test_a_hit_tells_its_age_and_type() -> None:
    backend = Backend()
    await backend.ask(request())
    backend.now += 12.7
    complete = await backend.cache.lookup(backend.plan(request()))
    stream = await backend.cache.lookup(backend.plan(streamed()))
    assert isinstance(complete, Hit)
    assert isinstance(stream, Hit)
    assert complete.headers() == {"content-type": "application/json", "x-fovea-cache": "hit", "age": "12"}
    assert stream.headers()["content-type"] == "text/event-stream"
    assert json.loads(complete.payload())["id"] == "chatcmpl-1"


async def test_the_same_bytes_behind_two_urls_are_one_entry_and_other_bytes_are_not() -> None:
    backend = Backend()
    await backend.ask(request())
    await backend.ask(request(), image=content_identity("image/png", 8, 8, b"cat"))
    assert backend.calls == 1
    await backend.ask(request(), image=content_identity("image/png", 8, 8, b"dog"))
    await backend.ask(request("And that?"))
    assert backend.calls == 3


@pytest.mark.parametrize(("scope", "calls"), [("tenant", 2), ("shared", 1)])
async def test_tenants_share_only_in_the_shared_scope(scope: str, calls: int) -> None:
    backend = Backend(ResponseCacheSettings(response_cache_scope=scope))
    for tenant in ("a", "b", "a", "b"):
        await backend.ask(request(), tenant=tenant)
    assert backend.calls == calls


async def test_a_tenant_named_like_the_shared_scope_gains_nothing() -> None:
    shared = Backend(ResponseCacheSettings(response_cache_scope="shared"))
    assert shared.plan(request()).key != Backend().plan(request(), tenant="shared").key


async def test_the_directives_of_a_client() -> None:
    backend = Backend()
    await backend.ask(request(), cache_control="no-store")
    await backend.ask(request())
    assert backend.calls == 2
    backend.answer = answer("A dog.")
    await backend.ask(request(), cache_control="no-store")
    assert b"cat" in await backend.ask(request())
    await backend.ask(request(), cache_control="no-cache")
    assert b"dog" in await backend.ask(request())
    assert backend.calls == 4
    stats = backend.cache.stats()
    assert (stats["bypass_no_store"], stats["bypass_no_cache"], stats["stores"]) == (2, 1, 2)


async def test_random_answers_are_stored_only_if_the_client_asks() -> None:
    backend, body = Backend(), request(temperature=0.7)
    for _ in range(2):
        await backend.ask(body)
    assert backend.calls == 2
    assert backend.cache.stats()["bypass_not_deterministic"] == 2
    for _ in range(2):
        await backend.ask(body, asked=True)
    assert backend.calls == 3


async def test_an_answer_ends_with_its_time() -> None:
    backend = Backend(ResponseCacheSettings(response_cache_ttl_s=60))
    await backend.ask(request())
    backend.now += 59
    await backend.ask(request())
    assert backend.calls == 1
    backend.now += 2
    await backend.ask(request())
    assert backend.calls == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"status": 500}, "status"),
        ({"answer": {"error": {}}}, "error"),
        ({"answer": answer("x" * 2000)}, "too_large"),
    ],
)
async def test_answers_that_are_not_stored(change: dict[str, Any], reason: str) -> None:
    backend = Backend(ResponseCacheSettings(response_cache_answer_kib=1))
    vars(backend).update(change)
    for _ in range(2):
        await backend.ask(request())
    stats = backend.cache.stats()
    assert (backend.calls, stats["stores"], stats[f"refused_{reason}"], stats["hits"]) == (2, 0, 2, 0)
    assert (stats["leaders"], stats["recording_bytes"]) == (0, 0)


async def test_several_choices_and_prompts_are_counted() -> None:
    backend = Backend()
    await backend.ask(request(n=2))
    assert backend.cache.stats()["refused_missing_choice"] == 1
    prompts: list[tuple[Any, int]] = [("one", 1), (["one", "two"], 2), ([1, 2, 3], 1), ([[1], [2], [3]], 3)]
    for prompt, count in prompts:
        body = {"prompt": prompt, "n": 2, "temperature": 0}
        assert backend.cache.plan(body, [], tenant="a", model_version="m").choices == 2 * count


async def waiting(backend: Backend, count: int, **options: Any) -> list[asyncio.Task[bytes]]:
    """Start equal requests while the backend holds its answer back."""
    backend.gate.clear()
    tasks = [asyncio.create_task(backend.ask(streamed() if n % 2 else USAGE)) for n in range(count)]
    while backend.calls == 0:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_equal_requests_at_the_same_time_are_answered_once() -> None:
    backend = Backend()
    tasks = await waiting(backend, 6)
    backend.gate.set()
    answers = await asyncio.gather(*tasks)
    assert backend.calls == 1
    assert set(answers[::2]) == {b"".join(events(backend.answer, include_usage=True))}
    assert set(answers[1::2]) == {b"".join(events(backend.answer, include_usage=False))}
    stats = backend.cache.stats()
    assert (stats["joined"], stats["hits"], stats["misses"], stats["leaders"]) == (5, 5, 1, 0)


async def test_if_the_client_of_the_leader_is_gone_another_request_leads() -> None:
    backend = Backend()
    tasks = await waiting(backend, 4)
    tasks[0].cancel()
    while backend.calls < 2:
        await asyncio.sleep(0)
    backend.gate.set()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(ends[0], asyncio.CancelledError)
    assert all(isinstance(end, bytes) for end in ends[1:])
    # The second leader's stream has no token counts, so the third request, which wants them, asks by itself.
    assert backend.calls == 3
    assert backend.cache.stats()["leaders"] == 0


async def test_without_a_wait_no_request_follows_another_one() -> None:
    backend = Backend(ResponseCacheSettings(response_cache_wait_s=0))
    plan = backend.plan(request())
    assert await backend.cache.lookup(plan) is None
    assert plan.seat is None


@pytest.mark.parametrize("answer", [answer("x" * 2000), {"error": {}}, {"choices": []}])
async def test_nobody_hangs_if_the_leader_has_nothing_to_store(answer: Any) -> None:
    backend = Backend(ResponseCacheSettings(response_cache_answer_kib=1))
    backend.gate.clear()
    backend.answer = answer
    tasks = [asyncio.create_task(backend.ask(request())) for _ in range(4)]
    await asyncio.sleep(0)
    backend.gate.set()
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks)
    assert backend.calls == 4
    assert backend.cache.stats()["leaders"] == 0


async def test_a_request_does_not_wait_longer_than_it_wants() -> None:
    backend = Backend(ResponseCacheSettings(response_cache_wait_s=0.001))
    tasks = await waiting(backend, 1)
    assert await backend.cache.lookup(backend.plan(USAGE)) is None
    backend.gate.set()
    await asyncio.gather(*tasks)
    assert await backend.cache.lookup(backend.plan(USAGE)) is not None


async def test_a_plan_that_is_not_recorded_is_abandoned() -> None:
    backend = Backend()
    plan = backend.plan(request())
    assert await backend.cache.lookup(plan) is None
    assert backend.cache.stats()["leaders"] == 1
    backend.cache.abandon(plan)
    assert backend.cache.stats()["leaders"] == 0


async def test_requests_do_not_wait_for_an_answer_that_will_not_be_stored() -> None:
    backend = Backend(ResponseCacheSettings(response_cache_answer_kib=1))
    plan = backend.plan(request())
    await backend.cache.lookup(plan)
    follower = asyncio.create_task(backend.cache.lookup(backend.plan(request())))
    await asyncio.sleep(0)
    recorder = backend.cache.record(plan)
    assert recorder.active
    assert not follower.done()
    recorder.feed(b"x" * 2000)
    assert await follower is None
    assert not recorder.active
    recorder.finish(200)
    assert not backend.cache.record(backend.plan(request(temperature=1))).active


async def test_the_bytes_of_recordings_are_bounded_together() -> None:
    settings = ResponseCacheSettings(response_cache_recording_mib=1, response_cache_answer_kib=900)
    backend = Backend(settings)
    first, second, third = (backend.cache.record(backend.plan(request(seed=n))) for n in range(3))
    first.feed(b"x" * 700_000)
    second.feed(b"x" * 700_000)
    assert (first.active, second.active) == (True, False)
    assert backend.cache.stats()["recording_bytes"] == 700_000
    first.feed(b"x" * 700_000)
    assert not first.active
    assert backend.cache.stats()["recording_bytes"] == 0
    first.feed(b"x")
    third.feed(b"x" * 800_000)
    assert backend.cache.stats()["recording_bytes"] == 800_000
    assert (backend.cache.stats()["refused_no_room"], backend.cache.stats()["refused_too_large"]) == (1, 1)


async def test_clearing() -> None:
    backend = Backend()
    for tenant in ("a", "b"):
        await backend.ask(request(), tenant=tenant)
    assert await backend.cache.clear() == 2
    assert await backend.cache.lookup(backend.plan(request(), tenant="a")) is None
    assert await backend.cache.lookup(backend.plan(request(), tenant="b")) is None


async def test_closing_finishes_what_is_being_stored() -> None:
    backend = Backend()
    plan = backend.plan(USAGE)
    with backend.cache.record(plan) as recorder:
        recorder.feed(b"".join(events(backend.answer, include_usage=True)))
        recorder.feed(sent())
        recorder.finish(200)
    await backend.cache.aclose()
    assert backend.cache.stats()["stores"] == 1


async def test_two_workers_share_answers_through_redis(redis: RedisProcess) -> None:
    caches = [open_cache(ResponseCacheSettings(), redis.url) for _ in range(2)]
    body = request()
    for cache in caches:
        assert cache is not None
        plan = cache.plan(body, [CAT], tenant="a", model_version="m@1")
        hit = await cache.lookup(plan)
        if cache is caches[0]:
            assert hit is None
            with cache.record(plan) as recorder:
                recorder.feed(json.dumps(answer()).encode())
                recorder.finish(200)
        else:
            assert hit is not None
            assert json.loads(hit.payload()) == answer()
        await cache.aclose()


async def test_building_from_settings() -> None:
    assert open_cache(ResponseCacheSettings(response_cache_mib=0)) is None
    cache = open_cache(ResponseCacheSettings())
    assert cache is not None
    assert cache.stats()["memory_capacity_bytes"] == 64 << 20
    await cache.aclose()
    with pytest.raises(ConfigError, match="redis://HOST:PORT/DB"):
        open_cache(ResponseCacheSettings(), "http://example.org")
    with pytest.raises(ConfigError, match="response_cache_scope"):
        ResponseCacheSettings(response_cache_scope="all")
