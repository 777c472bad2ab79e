"""Other models, old answers, circuit breakers and hedges: what a request meets if its backend is not well."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from fovea.gateway.config import ModelConfig
from fovea.gateway.settings import ResponseCacheSettings
from tests.gateway.support import (
    FakeEngine,
    Plan,
    about,
    data_url,
    picture,
    resilience,
    running,
    soon,
    tables,
    words,
)

LADDER = (
    ModelConfig("large", fallback=("medium", "small")),
    ModelConfig("medium"),
    ModelConfig("small"),
)
SURE: Any = {"model": "large", "temperature": 0}


async def test_a_request_falls_from_model_to_model_to_an_old_answer_to_an_error() -> None:
    """Each step is told to the client. An answer that is still fresh would hide them, so it expires first."""
    large, medium, small = FakeEngine("l", "large"), FakeEngine("m", "medium"), FakeEngine("s", "small")
    cache = ResponseCacheSettings(response_cache_ttl_s=1)
    given: Any = {
        "resilience": resilience(retry_share=1.0, breaker_failures=1000),
        "response_cache": cache,
    }
    async with large, medium, small:
        given["tables"] = tables((large, medium, small), models=LADDER)
        async with running(**given) as gateway:
            first = await gateway.ask(**SURE)
            assert (first.headers["x-fovea-backend"], first.headers["x-fovea-model"]) == ("l", "large")
            assert "x-fovea-fallback" not in first.headers

            large.plan = Plan(500)
            second = await gateway.ask("new", **SURE)
            assert second.headers["x-fovea-fallback"] == "large -> medium"
            assert (second.headers["x-fovea-backend"], second.headers["x-fovea-route"][:9]) == (
                "m",
                "fallback,",
            )

            medium.plan = Plan(wait_s=0, status=503)
            third = await gateway.ask("new", stream=True, **SURE)
            assert third.headers["x-fovea-fallback"] == "large -> small"
            assert third.headers["x-fovea-attempts"] == "3"
            assert words(third.text) == ["s", "s", "s"]

            small.plan = Plan(end="close", events=0)
            await asyncio.sleep(1.05)
            old = await gateway.ask(**SURE)
            assert old.status_code == 200
            assert old.headers["x-fovea-fallback"] == "large -> cache"
            assert old.headers["x-fovea-cache"] == "stale"
            assert old.json()["choices"] == first.json()["choices"]

            sent = await gateway.ask("never answered", **SURE)
            error = sent.json()["error"]
            assert sent.status_code in (502, 503)
            assert error["message"]
            assert error["code"]
            assert await gateway.metric("retries_total", kind="fallback") >= 4


async def test_the_answer_of_another_model_is_not_kept_for_the_wanted_one() -> None:
    large, medium = FakeEngine("l", "large", plan=Plan(500)), FakeEngine("m", "medium")
    async with large, medium:
        models = (ModelConfig("large", fallback=("medium",)), ModelConfig("medium"))
        async with running(tables=tables((large, medium), models=models)) as gateway:
            assert (await gateway.ask(**SURE)).headers["x-fovea-fallback"] == "large -> medium"
            large.plan = Plan()
            again = await gateway.ask(**SURE)
    assert again.headers["x-fovea-backend"] == "l"
    assert again.headers["x-fovea-cache"] == "miss"


async def test_images_fail_alone_and_are_probed_again_after_the_pause() -> None:
    """The vision stage opens after five failures. Text goes on. One probe at a time, then all is well."""
    engine = FakeEngine("v", plan=Plan(500))
    settings = resilience(breaker_failures=5, breaker_open_s=0.4)
    async with engine, running(engine, resilience=settings) as gateway:
        for number in range(5):
            answer = await gateway.ask(messages=about(data_url(picture(number))))
            assert answer.status_code == 502
        engine.plan = Plan()
        refused = await gateway.ask(messages=about(data_url(picture())))
        assert (refused.status_code, len(engine.received)) == (503, 5)
        assert "v: breaker open" in refused.json()["error"]["message"]
        assert (await gateway.ask("only text")).status_code == 200
        shown = await gateway.backend("v")
        assert shown["accepts"] == {"text": "yes", "images": "breaker open"}
        assert shown["breakers"] == {"connect": "closed", "text": "closed", "vision": "open"}
        assert await gateway.metric("breaker_opened_total", backend="v", stage="vision") == 1
        assert await gateway.metric("breaker_open", backend="v", stage="vision") == 1
        assert await gateway.metric("breaker_open", backend="v", stage="text") == 0

        await asyncio.sleep(0.45)
        engine.plans.append(Plan(wait_s=0.2))
        sent = [gateway.ask(messages=about(data_url(picture(n)))) for n in range(4)]
        statuses = sorted(answer.status_code for answer in await asyncio.gather(*sent))
        assert statuses == [200, 503, 503, 503]  # only the probe was let through
        again = await gateway.ask(messages=about(data_url(picture())))
        assert again.status_code == 200
        assert (await gateway.backend("v"))["breakers"]["vision"] == "closed"


async def test_a_backend_that_refuses_connections_gets_none_until_it_is_probed() -> None:
    engine = FakeEngine("gone")
    settings = resilience(breaker_failures=2, breaker_open_s=0.3)
    async with engine, running(engine, resilience=settings) as gateway:
        await engine.die()
        for _ in range(2):
            answer = await gateway.ask()
            assert answer.status_code == 502
            assert "cannot be connected to" in answer.json()["error"]["message"]
        assert (await gateway.backend("gone"))["breakers"]["connect"] == "open"
        assert (await gateway.ask()).status_code == 503
        await engine.start()
        await asyncio.sleep(0.35)
        assert (await gateway.ask()).status_code == 200


async def test_streams_that_break_open_the_breaker_too() -> None:
    engine = FakeEngine("b", plan=Plan(end="close"))
    async with engine, running(engine, resilience=resilience(breaker_failures=2)) as gateway:
        for _ in range(2):
            assert "[DONE]" not in (await gateway.ask(stream=True)).text
        assert (await gateway.ask(stream=True)).status_code == 503


async def test_the_slower_of_two_hedged_backends_is_told_to_stop() -> None:
    """Both get the request, one answer reaches the client, and the slow engine sees its connection close."""
    slow, fast = FakeEngine("a"), FakeEngine("b")
    settings = resilience(hedge_after_s=0.15, retry_share=1.0)
    async with slow, fast, running(slow, fast, resilience=settings) as gateway:
        for stream in (False, True):
            slow.plans.append(Plan(wait_s=math.inf))
            fast.plans.append(Plan(wait_s=math.inf))
            # Whichever is asked first is the slow one: the other one's second plan answers at once.
            sent = asyncio.create_task(gateway.ask(f"question {stream}", stream=stream))
            await soon(lambda: any(not engine.plans for engine in (slow, fast)))
            loser, winner = (slow, fast) if not slow.plans else (fast, slow)
            winner.plans.clear()
            answer = await sent
            assert answer.status_code == 200
            assert answer.headers["x-fovea-backend"] == winner.name
            assert answer.headers["x-fovea-route"].startswith("hedge, ")
            if stream:
                assert words(answer.text) == [winner.name] * 3
            for engine in (slow, fast):
                await soon(lambda name=engine.name: _idle(gateway, name))
        assert slow.cut + fast.cut == 2
        assert len(slow.received) == len(fast.received) == 2
        assert await gateway.metric("retries_total", kind="hedge") == 2


async def test_a_hedge_is_not_sent_if_the_first_byte_comes_in_time() -> None:
    one, two = FakeEngine("a"), FakeEngine("b")
    async with one, two, running(one, two, resilience=resilience(hedge_after_s=5)) as gateway:
        for number in range(6):
            assert (await gateway.ask(str(number))).status_code == 200
    assert len(one.received) + len(two.received) == 6


async def _idle(gateway: Any, name: str) -> bool:
    shown = await gateway.backend(name)
    return (shown["requests"], shown["text_tokens"], shown["visual_tokens"]) == (0, 0, 0)
