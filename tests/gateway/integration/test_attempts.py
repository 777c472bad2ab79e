"""A request is repeated before its first byte only, and every level of time limits says what was late."""

from __future__ import annotations

import asyncio
import math
import socket
from dataclasses import replace
from typing import Any

import openai
import pytest

from fovea.gateway.config import Tables
from fovea.gateway.settings import ResilienceSettings, RouteSettings, TimeoutSettings
from tests.gateway.support import FakeEngine, Plan, error_of, resilience, running, soon, words

STALLED = Plan(wait_s=math.inf)
SHORT = TimeoutSettings(connect_s=0.3, first_byte_s=0.3, idle_s=0.3, total_s=5)
FAILURES = {
    "500": Plan(500),
    "503": Plan(503),
    "429": Plan(429, headers={"retry-after": "1"}),
    "reset": Plan(end="reset", events=0),
    "close": Plan(end="close", events=0),
    "stream error": Plan(end="error", events=0),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_another_backend_answers_if_the_first_fails_before_its_first_byte(name: str) -> None:
    """The failing one is asked first by priority; the SDK sees the other's answer only."""
    async with FakeEngine("bad", plan=FAILURES[name]) as bad, FakeEngine("good") as good:
        table = Tables((replace(bad.config, priority=0), replace(good.config, priority=1)))
        given: Any = {"route": RouteSettings(policy="priority"), "resilience": resilience(retry_share=1.0)}
        async with running(tables=table, **given) as gateway:
            for _ in range(4):
                assert await gateway.says(stream=True) == "good good good "
            if name != "stream error":
                assert await gateway.says("other") == "good good good"
        assert len(good.received) >= 4
        assert bad.received


@pytest.mark.parametrize("end", ["stall", "reset", "close", "error"])
async def test_a_stream_that_breaks_ends_with_an_error_and_is_not_continued_elsewhere(end: str) -> None:
    broken, other = FakeEngine("a", plan=Plan(end=end)), FakeEngine("b", plan=Plan(end=end))
    async with broken, other, running(broken, other, timeouts=SHORT) as gateway:
        answer = await gateway.ask(stream=True)
        assert answer.status_code == 200
        assert len(set(words(answer.text))) == 1
        assert len(words(answer.text)) == 3
        assert "[DONE]" not in answer.text
        assert error_of(answer.text)["message"]
        assert len(broken.received) + len(other.received) == 1
        with pytest.raises(openai.APIError):
            await gateway.says(stream=True)
        assert len(broken.received) + len(other.received) == 2
        assert await gateway.metric("retries_total") == 0


async def test_errors_that_another_backend_would_repeat_are_passed_on() -> None:
    async with (
        FakeEngine("a", plan=Plan(400)) as one,
        FakeEngine("b", plan=Plan(400)) as two,
        running(one, two) as gateway,
    ):
        with pytest.raises(openai.BadRequestError, match="refuses"):
            await gateway.says()
        with pytest.raises(openai.BadRequestError, match="refuses"):
            await gateway.says(stream=True)
    assert len(one.received) + len(two.received) == 2


async def test_a_busy_fleet_answers_429_with_the_time_that_the_backend_named() -> None:
    plan = Plan(429, headers={"retry-after": "7"})
    async with FakeEngine("a", plan=plan) as one, running(one) as gateway:
        answer = await gateway.ask()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        with pytest.raises(openai.RateLimitError, match="all backends are busy") as caught:
            await gateway.says()
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 7
    assert len(one.received) == 1  # it asked for a pause, and gets one


async def test_retries_are_a_part_of_the_requests_so_that_they_cannot_double_a_load() -> None:
    engines = [FakeEngine(name, plan=Plan(500)) for name in "abc"]
    settings = ResilienceSettings(
        probe_every_s=0, outlier_factor=0, breaker_failures=1000, retry_share=0.1, max_attempts=3
    )
    async with engines[0], engines[1], engines[2], running(*engines, resilience=settings) as gateway:
        for _ in range(60):
            assert (await gateway.ask()).status_code == 502
        sent = sum(len(engine.received) for engine in engines)
        retries = await gateway.metric("retries_total", kind="retry")
    assert sent == 60 + retries
    assert retries <= 10 + 0.1 * 60


async def test_a_host_that_never_accepts_is_given_up_after_connect_s() -> None:
    """The queue of a listening socket is full, so that further connections get no answer at all."""
    with socket.socket() as hole, socket.socket() as first, socket.socket() as second:
        async with FakeEngine("lost") as lost, running(lost, timeouts=SHORT) as gateway:
            await lost.die()
            hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            hole.bind(("127.0.0.1", lost.port))
            hole.listen(0)
            for filler in (first, second):
                filler.setblocking(False)
                filler.connect_ex(hole.getsockname())
            answer = await gateway.ask()
    assert answer.status_code == 502
    message = answer.json()["error"]["message"]
    assert "lost cannot be connected to" in message
    assert "time" in message.lower()


async def test_a_first_byte_that_is_late_is_named_and_the_backend_is_let_go() -> None:
    async with FakeEngine("slow", plan=STALLED) as slow, running(slow, timeouts=SHORT) as gateway:
        answer = await gateway.ask(stream=True)
        assert answer.status_code == 504
        assert "slow gave no first byte in time (first_byte_s)" in answer.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError, match="first byte"):
            await gateway.says(stream=True)
        await soon(lambda: slow.cut == 2)


async def test_a_silent_stream_is_ended_after_idle_s() -> None:
    async with FakeEngine("mute", plan=Plan(end="stall")) as mute, running(mute, timeouts=SHORT) as gateway:
        answer = await gateway.ask(stream=True)
        error = error_of(answer.text)
        assert (error["code"], "mute sent nothing more in time (idle_s)" in error["message"]) == (
            "upstream_timeout",
            True,
        )
        await soon(lambda: mute.cut == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_total_time_bounds_answers_that_never_stop(stream: bool) -> None:
    times = TimeoutSettings(total_s=0.5, first_byte_s=5, idle_s=5)
    plan = Plan(events=10**6, gap_s=0.05) if stream else STALLED
    async with FakeEngine("long", plan=plan) as long, running(long, timeouts=times) as gateway:
        answer = await gateway.ask(stream=stream)
        error = error_of(answer.text) if stream else answer.json()["error"]
        assert answer.status_code == (200 if stream else 504)
        assert error["code"] == "upstream_timeout"
        late = "long was not done in time (total_s)" if stream else "long gave no answer in time (total_s)"
        assert late in error["message"]
        await soon(lambda: long.cut == 1)


async def test_the_total_time_bounds_all_attempts_together() -> None:
    times = TimeoutSettings(total_s=0.5, first_byte_s=0.3)
    engines = [FakeEngine(name, plan=STALLED) for name in "abc"]
    async with engines[0], engines[1], engines[2], running(*engines, timeouts=times) as gateway:
        answer = await gateway.ask(stream=True)
        assert answer.status_code == 504
        assert (
            "gave no first byte in time (total_s) (2 backends were asked)"
            in answer.json()["error"]["message"]
        )
        await soon(lambda: sum(engine.cut for engine in engines) == 2)
    assert sum(len(engine.received) for engine in engines) == 2


async def test_a_request_that_waits_for_a_queue_slot_is_bounded_too() -> None:
    async with FakeEngine("one", plan=Plan(wait_s=0.6)) as one:
        config = replace(one.config, max_requests=1)
        async with running(tables=Tables((config,)), timeouts=TimeoutSettings(total_s=0.8)) as gateway:
            first = asyncio.create_task(gateway.ask())
            await soon(lambda: one.received)
            one.plan = STALLED
            second, third = await asyncio.gather(gateway.ask("second"), gateway.ask("third"))
            assert (await first).status_code == 200
    late = {answer.status_code: answer.json()["error"]["message"] for answer in (second, third)}
    assert late.keys() == {408, 504}
    assert "waited for a backend with room" in late[408] or "total_s" in late[408]
    assert "one gave no answer in time (total_s)" in late[504]
    assert len(one.received) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_deadlines_of_a_client_close_no_backend_to_others(stream: bool) -> None:
    """Eight requests with `timeout: 0.001` once opened the breakers of all backends: 503 for everyone.

    The deadline is the client's own. It gets its 408, no other backend is asked, and all backends stay.
    """
    engines = [FakeEngine(name, plan=Plan(408)) for name in "ab"]
    async with engines[0], engines[1], running(*engines) as gateway:
        for _ in range(8):
            answer = await gateway.ask(timeout=0.001, stream=stream)
            assert (answer.status_code, answer.json()["error"]["message"][1:]) == (408, " refuses")
        assert sum(len(engine.received) for engine in engines) == 8
        assert await gateway.metric("retries_total") == 0
        for engine in engines:
            engine.plan = Plan()
            assert (await gateway.backend(engine.name))["breakers"]["text"] == "closed"
        assert (await gateway.ask()).status_code == 200


@pytest.mark.parametrize("events", [0, 2])
async def test_a_deadline_in_a_stream_closes_no_backend_to_others(events: int) -> None:
    """An engine that has begun its stream tells the deadline by an error event: no failure, and no retry."""
    error = {"type": "timeout_error", "code": "deadline_exceeded"}
    engines = [FakeEngine(name, plan=Plan(events=events, end="error", error=error)) for name in "ab"]
    async with engines[0], engines[1], running(*engines) as gateway:
        for _ in range(8):
            answer = await gateway.ask(stream=True, timeout=0.5)
            assert error_of(answer.text)["code"] == "deadline_exceeded"
        assert sum(len(engine.received) for engine in engines) == 8
        for engine in engines:
            assert (await gateway.backend(engine.name))["breakers"]["text"] == "closed"


async def test_a_stream_that_ends_properly_without_done_is_complete() -> None:
    """Some engines close the stream after the finish reason. Clients get the [DONE] for which they wait."""
    async with FakeEngine("a", plan=Plan(end="bare")) as one, running(one) as gateway:
        for _ in range(10):
            answer = await gateway.ask(stream=True)
            assert words(answer.text) == ["a"] * 3
            assert "error" not in answer.text
            assert answer.text.endswith("data: [DONE]\n\n")
        one.plan = Plan(end="mute")  # without a finish reason, half of the answer may be missing
        assert "before its last event" in error_of((await gateway.ask(stream=True)).text)["message"]


async def test_a_429_about_one_request_pauses_the_engine_for_nobody() -> None:
    """One tenant's costly schemas once gave another 69 of 79 refusals, because any 429 paused the engine."""
    plan = Plan(429, headers={"retry-after": "7", "x-fovea-scope": "request"})
    async with FakeEngine("a") as one, running(one) as gateway:
        one.plans.append(plan)
        answer = await gateway.ask()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert answer.headers["x-fovea-scope"] == "request"
        assert await gateway.says() == "a a a"
        one.plans.append(replace(plan, status=503))  # such as a video at an engine that cannot decode any
        answer = await gateway.ask()
        assert (answer.status_code, answer.headers["x-fovea-scope"]) == (503, "request")
        assert answer.json()["error"]["message"].endswith("no room for this request: a refuses")
        assert await gateway.says() == "a a a"
        one.plans.append(replace(plan, headers={"retry-after": "7", "x-fovea-scope": "engine"}))
        assert (await gateway.ask()).headers["x-fovea-scope"] == "engine"
        assert (await gateway.ask()).status_code == 429
    assert len(one.received) == 5
