"""Traffic workloads: which requests they send and when. The seed determines both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fovea.bench.measure import BenchRequest
from fovea.bench.run import plan
from fovea.bench.settings import Shape, Traffic
from fovea.bench.workloads import build_requests, class_of, play_chat, play_closed, play_open, play_trace
from fovea.core.errors import ConfigError
from fovea.core.trace import TraceRequest, generate
from tests.bench.support import SMALL, Scripted, workload_context

FAST = Traffic(rate=(1000.0,), requests=12, clients=3, images=4, turns=3)


async def questions(seed: int) -> list[BenchRequest]:
    shape = replace(SMALL, seed=seed)
    async with workload_context(Scripted(), shape) as context:
        return await build_requests(context, generate(FAST.load(shape, 1000.0)))


async def test_seed_determines_the_requests() -> None:
    assert await questions(1) == await questions(1)
    assert await questions(1) != await questions(2)


def test_rate_changes_only_the_times() -> None:
    one, other = (generate(FAST.load(SMALL, rate)) for rate in (1.0, 2.0))
    assert [replace(request, at=0.0) for request in one] == [replace(request, at=0.0) for request in other]
    assert one[-1].at > other[-1].at


async def test_open_loop_sends_all_requests_on_time() -> None:
    script = Scripted()
    async with workload_context(script) as context:
        result = await play_open(context, FAST, 1000.0)
    assert len(result.samples) == len(script.questions) == 12
    assert all(sample.succeeded for sample in result.samples)
    due = [sample.due_at - result.samples[0].due_at for sample in result.samples]
    times = [request.at for request in generate(FAST.load(SMALL, 1000.0))]
    assert due == pytest.approx([at - times[0] for at in times], abs=1e-6)


async def test_closed_loop_sends_all_requests() -> None:
    script = Scripted()
    async with workload_context(script) as context:
        result = await play_closed(context, FAST)
    assert len(result.samples) == len(script.questions) == 12


async def test_conversations_contain_the_servers_answers() -> None:
    script = Scripted()
    async with workload_context(script) as context:
        result = await play_chat(context, FAST)
    assert [sample.label for sample in result.samples] == ["first turn", "later turns", "later turns"] * 4
    longest = max(script.questions, key=lambda body: len(body["messages"]))["messages"]
    assert [message["role"] for message in longest] == ["user", "assistant", "user", "assistant", "user"]
    assert longest[1]["content"] == " 0 1 2 3"


async def test_conversation_ends_with_its_first_failure() -> None:
    async with workload_context(Scripted(statuses=[200, 500])) as context:
        result = await play_chat(context, replace(FAST, requests=3, clients=1))
    assert [sample.succeeded for sample in result.samples] == [False]


async def test_replay_of_a_trace() -> None:
    script = Scripted()
    trace = (
        TraceRequest(0.0, 20, 3, (("cat", 4),), system=15),
        TraceRequest(0.001, 20, 2, (("cat", 4), ("dog", 1)), system=15, priority=2),
        TraceRequest(0.002, 20, 4),
    )
    async with workload_context(script) as context:
        result = await play_trace(context, trace)
    assert [sample.label for sample in result.samples] == ["new image", "new image", "text"]
    assert [sample.images for sample in result.samples] == [1, 2, 0]
    by_length = {body["max_tokens"]: body for body in script.questions}
    assert sorted(by_length) == [2, 3, 4]
    assert by_length[2]["priority"] == 2
    assert "priority" not in by_length[3]
    assert [message["role"] for message in by_length[3]["messages"]] == ["system", "user"]
    assert by_length[2]["messages"][0] == by_length[3]["messages"][0], "the system prompt is shared"
    urls = [
        part["image_url"]["url"] for part in by_length[2]["messages"][1]["content"] if "image_url" in part
    ]
    assert urls[0] == by_length[3]["messages"][1]["content"][0]["image_url"]["url"]
    assert urls[0] != urls[1]


async def test_timeouts_of_a_trace() -> None:
    async with workload_context(Scripted()) as context:
        result = await play_trace(context, (TraceRequest(0.0, 5, 3, timeout=1e-9),))
    (only,) = result.samples
    assert only.failure is not None
    assert only.failure.kind == "timeout"


def test_class_of_a_request() -> None:
    one = TraceRequest(0, 1, 1, (("a", 4),))
    assert class_of(TraceRequest(0, 1, 1), {}) == "text"
    assert class_of(one, {}) == "new image"
    assert class_of(one, {("a", 4): "url"}) == "known image"


def test_plan_has_a_workload_per_rate() -> None:
    workloads = plan(["open", "closed", "chat"], SMALL, Traffic(rate=(1.0, 2.5), requests=10, turns=4), None)
    assert [(workload.name, workload.requests, workload.offered_rate) for workload in workloads] == [
        ("open 1/s", 10, 1.0), ("open 2.5/s", 10, 2.5), ("closed", 10, None), ("chat", 12, None),
    ]  # fmt: skip
    (workload,) = plan(["trace"], SMALL, Traffic(), (TraceRequest(0, 1, 1), TraceRequest(4.0, 1, 1)))
    assert (workload.requests, workload.offered_rate) == (2, 0.5)


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        (Shape, {"visual_tokens": ()}),
        (Shape, {"visual_tokens": (0,)}),
        (Shape, {"output_tokens": 1}),
        (Shape, {"concurrency": 0}),
        (Traffic, {"rate": ()}),
        (Traffic, {"rate": (1.0, 0.0)}),
        (Traffic, {"arrivals": "flood"}),
        (Traffic, {"text": 1.5}),
        (Traffic, {"turns": True}),
    ],
)
def test_invalid_settings(cls: type, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="accepted: ") as raised:
        cls(**wrong)
    assert raised.value.param == next(iter(wrong))
