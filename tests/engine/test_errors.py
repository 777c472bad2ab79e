"""An error ends only the requests that it concerns; the engine continues."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidImage,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unavailable,
)
from fovea.core.media import Image, PixelBudget
from fovea.core.types import GenerationRequest, TextPrompt, TokenPrompt
from fovea.engine.sample import sampler
from tests.support.engines import all_at_once, ask, assert_idle, engine, picture

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def machine(qwen: Path) -> Iterator[Engine]:
    with engine(qwen) as made:
        yield made


def still_answers(machine: Engine) -> None:
    answer = machine.generate(ask("and you?", picture(9)), **GREEDY)
    assert len(answer.token_ids[0]) == 8
    assert_idle(machine)


def outcomes(machine: Engine, prompts: list[Any]) -> list[Any]:
    """Return the answers or errors of prompts that share their steps."""

    def run(prompt: Any) -> Any:
        try:
            return machine.generate(prompt, **GREEDY).token_ids[0]
        except EngineError as error:
            return error

    with ThreadPoolExecutor(len(prompts)) as pool, all_at_once(machine, len(prompts)):
        return list(pool.map(run, prompts))


def test_the_error_for_a_long_prompt_has_the_numbers(qwen: Path) -> None:
    with engine(qwen, kv_blocks=4, block_size=8) as machine:
        assert machine.info.max_context == 32
        prompt = ask("x" * 40, picture(1))
        length = len(asyncio.run(machine.tokenize(prompt)))
        with pytest.raises(
            PromptTooLong, match=rf"the prompt has {length} tokens \(6 of them visual, 1 images\)"
        ) as caught:
            machine.generate(prompt, **GREEDY)
        assert "the context holds 32" in str(caught.value)
        assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
        assert_idle(machine)


def test_max_tokens_that_cannot_fit_are_refused_and_none_means_the_rest(qwen: Path) -> None:
    with engine(qwen, max_context=64) as machine:
        prompt = TokenPrompt(tuple(range(70, 120)))
        with pytest.raises(
            PromptTooLong, match=r"max_tokens is 15, .* 50 tokens the context of 64 has room for 14"
        ):
            machine.generate(prompt, temperature=0, max_tokens=15)
        answer = machine.generate(prompt, temperature=0, ignore_eos=True)
        assert len(answer.token_ids[0]) == 14
        assert answer.finish_reasons == ("length",)
        assert_idle(machine)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (TokenPrompt(()), "the prompt is empty"),
        (TokenPrompt((5, 100_000)), "token id 100000 is outside the vocabulary"),
        (TokenPrompt((-1,)), "token id -1 is outside"),
        (TextPrompt("a <|image_pad|> b"), "1 image markers .* for 0 images"),
    ],
    ids=["empty", "foreign id", "negative id", "marker without image"],
)
def test_an_invalid_prompt(machine: Engine, prompt: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        machine.generate(prompt, **GREEDY)
    still_answers(machine)


def test_image_tokens_cannot_be_sent_as_ids(machine: Engine) -> None:
    marker = machine.runner.model.image_token_id
    with pytest.raises(InvalidRequest, match="stands for an image"):
        machine.generate(TokenPrompt((80, marker)), **GREEDY)


def test_the_error_for_an_image_names_its_number(machine: Engine) -> None:
    sliver = Image("sliver", 2000, 2, bytes(12000))
    with pytest.raises(InvalidImage, match="^image 1: ") as caught:
        machine.generate(ask("?", picture(1), sliver), **GREEDY)
    assert caught.value.index == 1
    still_answers(machine)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"logit_bias": {384: 1.0}}, "logit_bias: token 384 is outside"),
        ({"stop_token_ids": (384,)}, "stop_token_ids: token 384 is outside"),
        ({"warmth": 1}, "unknown parameter 'warmth'; known: .*temperature"),
    ],
    ids=str,
)
def test_parameters_outside_the_models_vocabulary(machine: Engine, params: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        machine.generate(ask("hello"), **params)
    still_answers(machine)


class Broken(Exception):
    """An error of an unexpected class."""


def breaking(run: Callable[..., Any], when: Callable[..., bool], error: Exception) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise error
        return run(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyError("odd"), Broken("odd")], ids=repr)
def test_an_image_that_fails_to_encode_ends_only_its_own_requests(
    machine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Once, only some classes of exceptions ended the image's requests; others ended the whole step."""
    bad = picture(66)
    model = machine.runner.model
    good_prompts = [ask("one", picture(1)), ask("two words here")]
    truth = [machine.generate(prompt, **GREEDY).token_ids[0] for prompt in good_prompts]
    machine.clear_caches()
    broken = breaking(model.encode_slices, lambda image: image.identity == bad.identity, error)
    monkeypatch.setattr(model, "encode_slices", broken)
    prompts = [good_prompts[0], ask("first", bad), good_prompts[1], ask("second", bad)]
    found = outcomes(machine, prompts)
    assert [found[0], found[2]] == truth
    assert all(isinstance(found[i], EngineError) for i in (1, 3))
    monkeypatch.undo()
    still_answers(machine)
    assert len(machine.generate(prompts[1], **GREEDY).token_ids[0]) == 8, "the failure was cached"


def test_an_encoder_with_a_wrong_number_of_tokens_is_detected(
    machine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = machine.runner.model
    other = model.encode_slices

    def short(image: Any) -> Iterator[None]:
        features = yield from other(image)
        return type(features)(features.embeds[:-1], features.deepstack)

    monkeypatch.setattr(model, "encode_slices", short)
    with pytest.raises(EngineError, match="failed inside the engine"):
        machine.generate(ask("?", picture(1)), **GREEDY)
    assert "5 rows encoded, 6 planned" in caplog.text
    monkeypatch.undo()
    still_answers(machine)


def test_a_step_that_fails_ends_only_the_request_that_makes_it_fail(
    machine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every request of a failed step ended. Now they continue apart, until the guilty one is found.

    Its error has no text of the exception, which may hold file paths or shapes.
    """
    prompts = [ask("one", picture(1)), ask("two"), ask("a poisoned one"), ask("three", picture(1))]
    truth = [machine.generate(prompt, **GREEDY).token_ids[0] for prompt in prompts]
    poison = asyncio.run(machine.tokenize(prompts[2]))
    forward = machine.runner._forward

    def broken(work: list[Any], rows: list[int]) -> Any:
        if any(item.seq.prompt_ids == poison and len(item.seq.output_ids) == 3 for item in work):
            raise Broken("a defect in /srv/secret")
        return forward(work, rows)

    monkeypatch.setattr(machine.runner, "_forward", broken)
    with caplog.at_level(logging.CRITICAL, "fovea.engine"):
        found = outcomes(machine, prompts)
    error = found.pop(2)
    assert isinstance(error, EngineError)
    assert "secret" not in str(error)
    assert found == [truth[0], truth[1], truth[3]]
    assert 1 <= machine.stats()["failed_steps"] <= 3
    assert machine.status == "ready"
    still_answers(machine)


def test_ten_tokens_that_cannot_be_chosen_end_ten_requests_and_not_the_engine(
    machine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the ten small requests of an attack, whose parameters left no token to choose from.

    Each failed its whole step, and after ten of them the engine stopped for everybody.
    """
    choose = sampler.distribution

    def broken(row: Any, params: Any) -> Any:
        if params.seed == 13:
            raise IndexError("index 0 is out of bounds")
        return choose(row, params)

    monkeypatch.setattr(sampler, "distribution", broken)
    truth = machine.generate(ask("hello"), **GREEDY).token_ids[0]
    with caplog.at_level(logging.CRITICAL, "fovea.engine"):
        for _ in range(12):
            with pytest.raises(EngineError, match="failed inside the engine") as caught:
                machine.generate(ask("hello"), temperature=1, seed=13, max_tokens=4)
            assert "out of bounds" not in str(caught.value)
    assert machine.stats()["failed_steps"] == 0
    assert machine.generate(ask("hello"), **GREEDY).token_ids[0] == truth
    still_answers(machine)


def test_a_timeout_ends_a_running_request(machine: Engine) -> None:
    request = GenerationRequest(
        "slow", ask("tell me", picture(1)), machine.sampling({**GREEDY, "max_tokens": 3000}), timeout=0.05
    )
    with pytest.raises(DeadlineExceeded, match="timeout ran out") as caught:
        list(machine.iterate(request))
    assert caught.value.status == 408
    still_answers(machine)


def test_a_timeout_ends_a_waiting_request(qwen: Path) -> None:
    with engine(qwen, max_running=1) as machine:
        long = machine.iterate(machine.request(ask("long"), **{**GREEDY, "max_tokens": 3000}))
        next(long)
        request = GenerationRequest("late", ask("me too"), machine.sampling(GREEDY), timeout=0.02)
        with pytest.raises(DeadlineExceeded):
            list(machine.iterate(request))
        long.close()
        still_answers(machine)


def test_a_full_queue_is_overloaded_and_tells_when_to_retry(qwen: Path) -> None:
    with engine(qwen, max_running=1, max_queue=2) as machine:
        running = machine.iterate(machine.request(ask("x"), **{**GREEDY, "max_tokens": 3000}))
        next(running)
        with pytest.raises(Overloaded, match="1 choices are running or waiting; at most 3 may") as caught:
            machine.generate(ask("three choices"), **GREEDY, n=3)
        assert caught.value.status == 429
        assert caught.value.retry_after > 0
        running.close()
        still_answers(machine)


def test_after_shutdown_everything_is_refused_at_once(qwen: Path) -> None:
    """Once, clear_caches() waited a minute for the ended thread, then raised queue.Empty."""
    machine = engine(qwen)
    still_answers(machine)
    machine.shutdown()
    assert machine.status == "stopped"
    for action in (
        lambda: machine.generate(ask("hi"), **GREEDY),
        machine.clear_caches,
        machine.check_integrity,
    ):
        with pytest.raises(Unavailable):
            action()
    machine.shutdown()


def test_shutdown_sends_an_error_to_running_requests(qwen: Path) -> None:
    """Once, half an answer with the reason "abort" looked like a whole one."""
    machine = engine(qwen)
    deltas = machine.iterate(machine.request(ask("long"), **{**GREEDY, "max_tokens": 3000}))
    next(deltas)
    machine.shutdown()
    with pytest.raises(Unavailable, match="shutting down"):
        list(deltas)
    assert machine.stats()["kv_blocks_used"] == 0


def test_requests_during_shutdown_get_an_answer_or_an_error(qwen: Path) -> None:
    """No client may wait for an answer that will not come."""
    machine = engine(qwen)

    def ask_on() -> str:
        for _ in range(10_000):
            try:
                reason = machine.generate(ask("again"), **GREEDY).finish_reasons[0]
            except Unavailable:
                return "told"
            if reason != "length":
                return reason
        return "never stopped"

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask_on) for _ in range(8)]
        while machine.loop.board.generated_tokens < 50:
            threading.Event().wait(0.001)
        machine.shutdown()
        assert {future.result(timeout=30) for future in asking} == {"told"}


def test_a_second_request_with_the_same_id_is_refused_and_the_first_continues(machine: Engine) -> None:
    """Once, a second request with the same id replaced the first one, and the mixture killed the engine."""
    long = {**GREEDY, "max_tokens": 150}
    truth = machine.generate(ask("one"), **long).token_ids[0]
    first = machine.iterate(GenerationRequest("same", ask("one"), machine.sampling(long)))
    head = next(first)
    with pytest.raises(InvalidRequest, match="request 'same' is running already"):
        list(machine.iterate(GenerationRequest("same", ask("two"), machine.sampling({**GREEDY, "n": 2}))))
    ids = [*head.token_ids, *(token for delta in first for token in delta.token_ids)]
    assert tuple(ids) == truth
    still_answers(machine)


def test_a_closed_event_loop_ends_its_request_and_not_the_engine(machine: Engine) -> None:
    """Once, a client whose event loop was closed killed the engine for all requests.

    asyncio.run() cancels its tasks and closes the loop. The event of that cancellation then had no receiver.
    """

    async def leave_early() -> None:
        async def endless() -> None:
            async for _ in machine.stream(ask("long"), **{**GREEDY, "max_tokens": 3000}):
                pass

        task = asyncio.create_task(endless())
        while not machine.loop.board.generated_tokens:
            await asyncio.sleep(0.001)
        del task  # still running: asyncio.run cancels it at its end

    asyncio.run(leave_early())
    assert machine.status == "ready"
    still_answers(machine)


def test_a_loop_that_dies_sends_an_error_to_every_request(
    machine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise Broken("in the scheduler")

    monkeypatch.setattr(machine.scheduler, "schedule", broken)
    with (
        caplog.at_level(logging.CRITICAL, "fovea.engine"),
        pytest.raises(EngineError, match="stopped unexpectedly"),
    ):
        machine.generate(ask("hi"), **GREEDY)
    assert machine.status == "stopped"
    with pytest.raises(Unavailable):
        machine.generate(ask("hi"), **GREEDY)


async def test_close_waits_for_running_requests(qwen: Path) -> None:
    machine = engine(qwen)
    stream = machine.stream(ask("finish this"), **GREEDY)
    first = await anext(stream)
    closing = asyncio.create_task(machine.close(drain_s=30))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="shutting down"):
        await anext(machine.stream(ask("no more"), **GREEDY))
    rest = [delta async for delta in stream]
    await closing
    assert sum(len(delta.token_ids) for delta in (first, *rest)) == 8
    assert rest[-1].finish_reason == "length"


async def test_cancelling_during_preparation_leaves_nothing_behind(machine: Engine) -> None:
    task = asyncio.create_task(anext(machine.stream(ask("?", picture(5, 512, 512)), **GREEDY)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(still_answers, machine)


def test_the_error_for_an_impossible_budget_names_it(machine: Engine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        machine.generate(ask("?", picture(1), budget=PixelBudget(min_pixels=10**7, max_pixels=10)), **GREEDY)
    assert re.search(r"pixels", str(caught.value))
    still_answers(machine)
