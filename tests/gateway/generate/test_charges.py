"""Bills hold what a backend was given: in every API, however the answer ends, with and without usage."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from fovea.gateway.inspect.demand import Demand
from fovea.gateway.settings import ResilienceSettings, TimeoutSettings
from fovea.gateway.usage.log import UsageSettings, read_usage
from fovea.gateway.usage.prices import answer_tokens
from tests.gateway.hostile import (
    ANSWER,
    EVENT,
    RawBackend,
    Write,
    answer,
    chunk,
    keys_file,
    running,
    sends,
    soon,
    stream_head,
)
from tests.gateway.samples import body

BUDGET = "text_tokens_per_day = 100000"
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
TALK = {"messages": [{"role": "user", "content": "hi"}]}
PROMPTS: dict[str, Any] = {
    "chat": TALK,
    "messages": TALK,
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
}
TEXT = "word " * 200
WITHOUT_USAGE = {name: value for name, value in ANSWER.items() if name != "usage"}
LONG = {
    **WITHOUT_USAGE,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}],
}


async def charged(
    folder: Path,
    behave: Any,
    *,
    leave: bool = False,
    api: str = "chat",
    limits: str = BUDGET,
    times: Any = None,
    **fields: Any,
) -> tuple[float, dict[str, Any]]:
    """Send one request. Returns the text tokens of the tenant's day afterwards, and what the backend got."""
    keys = keys_file(folder, [("alice", limits)])
    more = {} if times is None else {"timeouts": times}
    value = {"model": "m", **PROMPTS[api], **fields}
    async with RawBackend(behave).listening() as backend, running(backend, keys_file=keys, **more) as gateway:
        asking = asyncio.create_task(gateway.raw(json.dumps(value).encode(), PATHS[api], key="alice-key"))
        if leave:
            await soon(lambda: backend.received)
            await asyncio.sleep(0.05)
            asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await soon(lambda: not gateway.gateway.services.running)
        return await day_of_alice(gateway), backend.received[0]


async def day_of_alice(gateway: Any) -> float:
    """The text tokens of the tenant's day."""
    services = gateway.gateway.services
    limits = services.tenants.authenticate(b"Bearer alice-key").limits
    day: float = (await services.accounts.usage("alice", limits)).day_used[1]
    return day


async def hang(write: Write, _: dict[str, Any]) -> None:
    await asyncio.sleep(30)


async def five_events(write: Write, _: dict[str, Any]) -> None:
    await write(stream_head())
    for _number in range(5):
        await write(chunk(EVENT))
    await asyncio.sleep(30)


CALL = {"id": "x" * 99, "type": "function", "function": {"name": "f" * 4, "arguments": "{" * 8}}
USE = {"type": "tool_use", "id": "x" * 9, "name": "f" * 4, "input": {"a": 1}}


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def refuses(status: int, **more: Any) -> Any:
    return sends(
        answer(
            {"error": {"message": "x", "type": "timeout_error", "code": "deadline_exceeded"}, **more}, status
        )
    )


async def test_a_clients_own_deadline_is_billed(tmp_path: Path) -> None:
    """14,619 tokens were once generated for a budget of 3,000 a day, by requests with a short `timeout`."""
    day, _ = await charged(tmp_path, refuses(408), timeout=1, max_tokens=500)
    assert 500 < day < 510
    told = {"prompt_tokens": 40, "completion_tokens": 7}
    day, _ = await charged(tmp_path, refuses(408, usage=told), timeout=1, max_tokens=500)
    assert day == 47
    day, _ = await charged(tmp_path, refuses(400), max_tokens=500)
    assert day == 0


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_a_client_that_leaves_a_stream_is_billed_for_what_was_generated(
    tmp_path: Path, api: str
) -> None:
    day, _ = await charged(tmp_path, five_events, api=api, leave=True, stream=True, max_tokens=900)
    assert 5 < day < 15
    day, _ = await charged(tmp_path, hang, api=api, leave=True, stream=True, max_tokens=900)
    assert 0 < day < 10, "nothing was generated"


@pytest.mark.parametrize("api", PATHS)
async def test_a_client_that_leaves_a_complete_answer_is_billed_for_the_longest(
    tmp_path: Path, api: str
) -> None:
    """Without max_tokens it was once charged 256, whatever was generated. Now the backend has the bound."""
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    day, got = await charged(tmp_path, hang, api=api, leave=True, **{limit: 300})
    assert 300 < day < 310
    if api == "messages":
        return  # max_tokens is required there
    day, got = await charged(tmp_path, hang, api=api, leave=True)
    bound = 16 if api == "completions" else 1024
    assert got["max_tokens"] == bound
    assert bound < day < bound + 10


async def test_an_answer_without_usage_is_billed_by_its_text(tmp_path: Path) -> None:
    day, _ = await charged(tmp_path, sends(answer(LONG)), max_tokens=None)
    assert 250 < day < 260
    day, _ = await charged(
        tmp_path, sends(answer({**LONG, "usage": {"prompt_tokens": 3, "completion_tokens": 200}}))
    )
    assert day == 203


async def test_the_slower_backend_of_a_hedge_is_not_billed(tmp_path: Path) -> None:
    """The operator has turned hedging on, so the tenant pays for one answer."""
    keys = keys_file(tmp_path, [("alice", BUDGET)])
    hedged = ResilienceSettings(probe_every_s=0, outlier_factor=0, hedge_after_s=0.05)
    slow, quick = RawBackend(hang), RawBackend()
    async with (
        slow.listening(),
        quick.listening(),
        running(slow, quick, keys_file=keys, resilience=hedged) as gateway,
    ):
        for _ in range(4):
            assert (await gateway.ask(key="alice-key")).status_code == 200
        await soon(lambda: not gateway.gateway.services.running)
        assert await day_of_alice(gateway) == 4 * 4
    assert slow.received


async def test_a_client_that_leaves_is_no_error(tmp_path: Path) -> None:
    """Clients that left were once counted as errors in the usage, and their prompts not at all."""
    file = tmp_path / "usage.sqlite"
    async with (
        RawBackend(five_events).listening() as backend,
        running(backend, usage=UsageSettings(usage_file=str(file))) as gateway,
    ):
        asking = asyncio.create_task(gateway.ask(stream=True))
        await soon(lambda: backend.received)
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await soon(lambda: not gateway.gateway.services.running)
    total = read_usage(file, ["tenant"], 0, 1 << 30).total
    assert (total.requests, total.errors, total.completion_tokens) == (1, 0, 5)
    assert total.prompt_tokens > 0


async def test_time_of_the_gateway_counts_in_limits(tmp_path: Path) -> None:
    times = TimeoutSettings(total_s=0.2)
    day, _ = await charged(tmp_path, hang, times=times, max_tokens=300)
    assert 300 < day < 310


@pytest.mark.parametrize(
    ("fields", "limits", "written"),
    [
        ({"max_tokens": -1}, BUDGET, 1024),
        ({"max_tokens": -1}, "requests_per_minute = 9", -1),
        ({"max_tokens": None}, BUDGET, 1024),
        ({"max_tokens": None}, "cost_per_day = 1.0", 1024),
        ({"max_tokens": None}, f"{BUDGET}\nanswer_tokens = 50", 50),
        ({"max_tokens": None, "n": 4}, "text_tokens_per_minute = 410", 102),
        ({"max_tokens": None, "n_predict": 30}, BUDGET, 30),
        ({"max_tokens": None, "min_tokens": 2000}, BUDGET, 2000),
        ({"max_tokens": None, "max_completion_tokens": 9}, BUDGET, None),
        ({"max_tokens": 7}, BUDGET, 7),
        ({"max_tokens": None}, "requests_per_minute = 9", None),
    ],
)
async def test_the_bound_is_written_into_requests_of_tenants_with_budgets(
    tmp_path: Path, fields: dict[str, Any], limits: str, written: int | None
) -> None:
    _, got = await charged(tmp_path, sends(answer()), limits=limits, **fields)
    assert got.get("max_tokens") == written


@pytest.mark.parametrize(
    ("api", "name"), [("chat", "max_tokens"), ("responses", "max_output_tokens"), ("messages", "max_tokens")]
)
def test_each_api_has_its_own_name_of_the_bound(api: str, name: str) -> None:
    given = body({"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2})
    demand = Demand(given, [])
    assert demand.with_answer_limit(given.value, api, 50, 0) == {**given.value, name: 50}
    assert demand.answer_tokens == 100
    assert name not in given.value


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        ({"choices": [{"message": {"role": "assistant", "content": "a" * 8, "reasoning": "b" * 4}}]}, 3),
        ({"choices": [{"text": "a" * 8, "finish_reason": "length"}, {"text": "b" * 8}]}, 4),
        ({"choices": [{"message": {"content": None, "tool_calls": [CALL]}}]}, 3),
        ({"content": [{"type": "text", "text": "a" * 8}, USE]}, 5),
        ({"output": [{"type": "message", "content": [{"type": "output_text", "text": "a" * 8}]}]}, 2),
        ({"error": {"message": "a" * 80}}, 0),
        ({"choices": 5, "content": None}, 0),
        ({"choices": nested(5000)}, 0),
    ],
)  # fmt: skip
def test_the_texts_of_answers_in_all_apis(value: Any, tokens: int) -> None:
    assert answer_tokens(value) == tokens
