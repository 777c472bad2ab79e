"""More requests than the backends can take: images get smaller first, then requests are refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from fovea.gateway.config import Tables
from fovea.gateway.settings import QueueSettings, RouteSettings
from tests.gateway.support import FakeEngine, Plan, about, data_url, picture, running, soon

ROUTE = RouteSettings(requests_per_backend=4, degrade_at=0.5)
QUEUE = QueueSettings(queue_length=2)
BUSY = Plan(wait_s=1.0)


async def test_images_get_smaller_then_requests_wait_then_they_are_refused() -> None:
    """Four run, two wait, others are refused with a time. Everything ends, and then all is as it was."""
    async with (
        FakeEngine("e", plan=BUSY, degrade="detail") as engine,
        running(engine, route=ROUTE, queue=QUEUE) as gateway,
    ):
        sent = []
        for number in range(6):
            messages = about(data_url(picture(number)))
            sent.append(asyncio.create_task(gateway.ask(messages=messages)))
            await soon(lambda count=number: _taken(gateway, count + 1))
        refused = await asyncio.gather(*(gateway.ask(str(number)) for number in range(5)))
        for answer in refused:
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error" or answer.json()["error"]["code"]
        assert len(engine.received) == 4, "those that wait have not been sent"
        answers = await asyncio.gather(*sent)
        assert [answer.status_code for answer in answers] == [200] * 6
        degraded = [answer.headers.get("x-fovea-degraded", "") for answer in answers]
        assert degraded == ["", "", "detail=medium", "detail=medium", "detail=low", "detail=low"]
        told = [_detail(received.json) for received in engine.received]
        assert sorted(str(detail) for detail in told) == ["None", "None", "low", "low", "medium", "medium"]
        assert await gateway.metric("degraded_total") == 4
        assert await gateway.metric("queued") == 0
        engine.plan = Plan()
        again = await gateway.ask(messages=about(data_url(picture())))
        assert (again.status_code, again.headers.get("x-fovea-degraded")) == (200, None)


def _detail(body: Any) -> Any:
    return body["messages"][0]["content"][0]["image_url"].get("detail")


async def _taken(gateway: Any, count: int) -> bool:
    """Whether so many requests run or wait."""
    queue = next((queue.queue for _, queue in gateway.gateway.services.queues), None)
    return queue is not None and queue.running + queue.waiting == count


@pytest.mark.parametrize("style", ["detail", "max-pixels", "off"])
async def test_backends_are_asked_in_their_own_way_and_a_wish_of_the_client_stays(style: str) -> None:
    async with FakeEngine("e", plan=BUSY) as engine:
        table = Tables((replace(engine.config, degrade=style),))
        async with running(tables=table, route=RouteSettings(requests_per_backend=1)) as gateway:
            first = asyncio.create_task(gateway.ask())
            await soon(lambda: engine.received)
            engine.plan = Plan()
            await asyncio.gather(
                gateway.ask(messages=about(data_url(picture(1)))),
                gateway.ask(messages=about(data_url(picture(2)), detail="high")),
            )
            await first
    bodies = [received.json for received in engine.received[1:]]
    details = [_detail(body) for body in bodies]
    assert sorted(map(str, details)) == (["high", "low"] if style == "detail" else ["None", "high"])
    limits = [body.get("mm_processor_kwargs") for body in bodies]
    assert all(bool(limit) == (style == "max-pixels") for limit in limits), json.dumps(bodies)


async def test_a_flood_ends_and_nothing_hangs() -> None:
    """120 requests at once against room for 4 and a queue of 20: each is answered or refused."""
    queue = QueueSettings(queue_length=20, queue_length_per_tenant=20)
    async with (
        FakeEngine("e", plan=Plan(wait_s=0.01)) as engine,
        running(engine, route=ROUTE, queue=queue) as gateway,
    ):
        answers = await asyncio.gather(*(gateway.ask(str(n), stream=n % 2 == 0) for n in range(120)))
        counts = dict.fromkeys((200, 429), 0)
        for answer in answers:
            counts[answer.status_code] += 1
        assert counts[200] >= 24
        assert counts[200] == len(engine.received)
        await soon(lambda: _taken(gateway, 0))
        assert (await gateway.backend("e"))["requests"] == 0
