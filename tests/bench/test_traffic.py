"""Loads: who is asked what, and that the seed decides it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fovea.bench.run import plan
from fovea.bench.sample import Ask
from fovea.bench.settings import Shape, Traffic
from fovea.bench.traffic import asks_of, class_of, play_chat, play_closed, play_open, play_trace
from fovea.core.errors import ConfigError
from fovea.core.trace import TraceRequest
from fovea.core.workload import generate
from tests.bench.support import SMALL, Scripted, stage_over

FAST = Traffic(rate=(1000.0,), requests=12, clients=3, images=4, turns=3)


async def questions(seed: int) -> list[Ask]:
    shape = replace(SMALL, seed=seed)
    async with stage_over(Scripted(), shape) as stage:
        return await asks_of(stage, generate(FAST.load(shape, 1000.0)))


async def test_the_seed_decides_what_is_asked() -> None:
    assert await questions(1) == await questions(1)
    assert await questions(1) != await questions(2)


def test_another_rate_asks_the_same_at_other_times() -> None:
    one, other = (generate(FAST.load(SMALL, rate)) for rate in (1.0, 2.0))
    assert [replace(request, at=0.0) for request in one] == [replace(request, at=0.0) for request in other]
    assert one[-1].at > other[-1].at


async def test_an_open_loop_asks_all() -> None:
    script = Scripted()
    async with stage_over(script) as stage:
        found = await play_open(stage, FAST, 1000.0)
    assert len(found.samples) == len(script.questions) == 12
    assert all(sample.whole for sample in found.samples)
    due = [sample.scheduled - found.samples[0].scheduled for sample in found.samples]
    times = [request.at for request in generate(FAST.load(SMALL, 1000.0))]
    assert due == pytest.approx([at - times[0] for at in times], abs=1e-6)


async def test_a_closed_loop_asks_all() -> None:
    script = Scripted()
    async with stage_over(script) as stage:
        found = await play_closed(stage, FAST)
    assert len(found.samples) == len(script.questions) == 12


async def test_conversations_grow_by_the_servers_own_answers() -> None:
    script = Scripted()
    async with stage_over(script) as stage:
        found = await play_chat(stage, FAST)
    assert [sample.label for sample in found.samples] == ["first turn", "later turns", "later turns"] * 4
    longest = max(script.questions, key=lambda body: len(body["messages"]))["messages"]
    assert [message["role"] for message in longest] == ["user", "assistant", "user", "assistant", "user"]
    assert longest[1]["content"] == " 0 1 2 3"


async def test_a_conversation_ends_with_its_first_failure() -> None:
    async with stage_over(Scripted(statuses=[200, 500])) as stage:
        found = await play_chat(stage, replace(FAST, requests=3, clients=1))
    assert [sample.whole for sample in found.samples] == [False]


async def test_a_trace_is_asked_as_it_says() -> None:
    script = Scripted()
    trace = (
        TraceRequest(0.0, 20, 3, (("cat", 4),), system=15),
        TraceRequest(0.001, 20, 2, (("cat", 4), ("dog", 1)), system=15, priority=2),
        TraceRequest(0.002, 20, 4),
    )
    async with stage_over(script) as stage:
        found = await play_trace(stage, trace)
    assert [sample.label for sample in found.samples] == ["new image", "new image", "text"]
    assert [sample.images for sample in found.samples] == [1, 2, 0]
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


async def test_a_traces_own_timeouts_hold() -> None:
    async with stage_over(Scripted()) as stage:
        found = await play_trace(stage, (TraceRequest(0.0, 5, 3, timeout=1e-9),))
    (only,) = found.samples
    assert only.failure is not None
    assert only.failure.kind == "timeout"


def test_classes() -> None:
    one = TraceRequest(0, 1, 1, (("a", 4),))
    assert class_of(TraceRequest(0, 1, 1), {}) == "text"
    assert class_of(one, {}) == "new image"
    assert class_of(one, {("a", 4): "url"}) == "known image"


def test_a_part_for_every_rate() -> None:
    parts = plan(["open", "closed", "chat"], SMALL, Traffic(rate=(1.0, 2.5), requests=10, turns=4), None)
    assert [(part.name, part.sends, part.offered) for part in parts] == [
        ("open 1/s", 10, 1.0), ("open 2.5/s", 10, 2.5), ("closed", 10, None), ("chat", 12, None),
    ]  # fmt: skip
    (part,) = plan(["trace"], SMALL, Traffic(), (TraceRequest(0, 1, 1), TraceRequest(4.0, 1, 1)))
    assert (part.sends, part.offered) == (2, 0.5)


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
def test_settings_that_are_none(cls: type, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="accepted: ") as raised:
        cls(**wrong)
    assert raised.value.param == next(iter(wrong))
