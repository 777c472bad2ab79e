"""Readers of an answer that are slower than the engine get several steps in one delta, and lose nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.errors import EngineError
from fovea.core.types import AnswerBuilder, Completion
from fovea.engine.job import Event, Reading, SampledToken, join_events

ONE, TWO, THREE = (SampledToken(number) for number in (1, 2, 3))


def test_steps_of_a_choice_are_joined_and_choices_stay_apart() -> None:
    joined = join_events(
        [
            Event(0, (ONE,), cached_tokens=4),
            Event(1, (THREE,)),
            Event(0, (TWO,), ended=True, finish_reason="stop", stop=2, cached_tokens=4),
        ]
    )
    assert joined == [
        Event(0, (ONE, TWO), ended=True, finish_reason="stop", stop=2, cached_tokens=4),
        Event(1, (THREE,)),
    ]


def test_texts_that_the_engine_has_read_are_joined() -> None:
    first, second = Reading("a", (), 1), Reading("b", (), 1)
    (event,) = join_events([Event(0, (ONE,), reading=first), Event(0, (TWO,), reading=second)])
    assert event.reading == Reading("ab", (), 2)


@pytest.mark.parametrize(
    "end",
    [
        Event(0, finish_reason="error", error=EngineError("it broke")),
        Event(0, finish_reason="abort"),
    ],
)
def test_tokens_before_an_error_are_not_lost(end: Event) -> None:
    assert join_events([Event(0, (ONE,)), Event(0, (TWO,)), end]) == [Event(0, (ONE, TWO)), end]


@pytest.fixture(scope="module")
def engine(qwen: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(str(qwen), kv_cache_mib=8) as engine:
        yield engine


async def read(engine: Engine, late: bool, **options: Any) -> tuple[Completion, int]:
    """Return an answer and its number of deltas.

    late: after each of them, the event loop does something else until the engine has nothing to do.
    """
    builder, deltas = AnswerBuilder(options.get("n", 1)), 0
    async for delta in engine.stream("hello", ignore_eos=True, max_tokens=48, seed=3, **options):
        builder.add(delta)
        deltas += 1
        deadline = time.monotonic() + 60
        while late and engine.stats()["requests_running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        await asyncio.sleep(0)
    return builder.build(), deltas


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3},
        {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
        {"stop": ("never written",)},
    ],
    ids=["plain", "choices", "logprobs", "stop string"],
)
def test_a_late_reader_gets_the_same_answer_in_fewer_deltas(engine: Engine, options: dict[str, Any]) -> None:
    """A server that had more to send than it could send fell behind without end, with an event per token.

    It then answered no new request, because its event loop was always busy with the old ones.
    """
    prompt, _ = asyncio.run(read(engine, False, **options))
    late, deltas = asyncio.run(read(engine, True, **options))
    assert late.texts == prompt.texts
    assert late.token_ids == prompt.token_ids
    assert late.finish_reasons == prompt.finish_reasons
    assert late.logprobs == prompt.logprobs
    assert late.prompt_logprobs == prompt.prompt_logprobs
    assert deltas < 24 * len(late.texts)
