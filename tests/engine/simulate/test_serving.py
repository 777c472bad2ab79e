"""The simulated engine client: lengths, figures, and nothing left behind when clients leave."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fovea.core.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unavailable,
)
from fovea.core.media import Image
from fovea.core.names import bundled_model
from fovea.core.sampling import SamplingParams
from fovea.core.types import (
    AnswerBuilder,
    ChatPrompt,
    Completion,
    GenerationRequest,
    ImagePart,
    Message,
    TextPart,
)
from fovea.engine.config import EngineConfig
from fovea.engine.load import read_config
from fovea.engine.models.tokenizer import load_tokenizer
from fovea.engine.simulate import executor
from fovea.engine.simulate.serving import FOLDER, SimulatedEngine, load_prompt_builder
from fovea.observe.table import FIGURES
from fovea.planner.cost import CostModel

FAST = CostModel(
    step_s=5e-4, decode_s=0, context_s=0, token_s=0, chunk_s=0, pair_s=0, visual_s=0, visual_pair_s=0
)
SLOW = replace(FAST, step_s=0.02)


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine(EngineConfig.of(kv_blocks=64), FAST)
    yield engine
    await engine.close()
    assert not engine.loop.stepper.sequences
    engine.scheduler.check_integrity()


def ask(
    text: str = "hello there", *, pictures: tuple[Image, ...] = (), name: str = "a", **options: Any
) -> GenerationRequest:
    own = {
        key: options.pop(key) for key in ("timeout", "encode_only", "cache_salt", "kv_keep") if key in options
    }
    parts = (*(ImagePart(picture) for picture in pictures), TextPart(text))
    return GenerationRequest(name, ChatPrompt((Message("user", parts),)), SamplingParams(**options), **own)


def picture(seed: str = "a", side: int = 64) -> Image:
    return Image(seed * 64, side, side, bytes(3 * side * side))


async def whole(engine: SimulatedEngine, request: GenerationRequest) -> Completion:
    answer = AnswerBuilder(request.sampling.n)
    async for delta in engine.stream(request):
        answer.add(delta)
    return answer.build()


async def test_an_answer_has_the_requested_length(engine: SimulatedEngine) -> None:
    answer = await whole(engine, ask(max_tokens=9))
    assert answer.usage.completion == len(answer.token_ids[0]) == 9
    assert answer.finish_reasons == ("length",)
    assert answer.text == engine.tokenizer.decode(answer.token_ids[0])
    assert answer.usage.prompt == len(await engine.tokenize(ask().prompt))
    assert answer.timings.ttft > 0


async def test_without_a_length_an_answer_ends_by_itself(engine: SimulatedEngine) -> None:
    answer = await whole(engine, ask())
    assert answer.finish_reasons == ("stop",)
    assert answer.usage.completion >= 1


async def test_a_request_may_keep_a_part_of_its_keys_and_values(engine: SimulatedEngine) -> None:
    done = await whole(engine, ask("hello there " * 60, kv_keep="snap:0.5", max_tokens=8))
    assert 0 < done.usage.dropped < done.usage.prompt
    with pytest.raises(InvalidRequest, match="kv_keep is 'snap:2'"):
        await whole(engine, ask(kv_keep="snap:2"))


async def test_equal_requests_get_equal_answers(engine: SimulatedEngine) -> None:
    one, same = await whole(engine, ask(max_tokens=20)), await whole(engine, ask(max_tokens=20))
    assert one.text == same.text
    assert one.text != (await whole(engine, ask("other", max_tokens=20))).text
    assert one.text != (await whole(engine, ask(max_tokens=20, seed=4))).text
    two = await whole(engine, ask(max_tokens=20, n=2))
    assert two.texts[0] == one.text != two.texts[1]


async def test_stop_strings_end_an_answer(engine: SimulatedEngine) -> None:
    text = (await whole(engine, ask(max_tokens=20))).text
    word = text.split()[3]
    answer = await whole(engine, ask(max_tokens=20, stop=(word,)))
    assert answer.text == text[: text.index(word)]
    assert answer.finish_reasons == ("stop",)


async def test_images_have_the_tokens_of_the_bundled_models_plan_and_are_cached(
    engine: SimulatedEngine,
) -> None:
    first = await whole(engine, ask(pictures=(picture(side=256),), max_tokens=2))
    assert first.usage.image == 64
    again = await whole(engine, ask("and now?", pictures=(picture(side=256),), max_tokens=2))
    assert again.usage.cached >= 64
    await whole(engine, ask(pictures=(picture("b"),), encode_only=True))
    assert engine.stats()["images_encoded"] == 2
    assert "b" * 64 in next(reversed(engine.scheduler.embeddings.keys))


async def test_steps_take_the_time_of_the_cost_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are added up instead of slept, so that the test does not depend on the machine's clock."""
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(executor, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    engine = SimulatedEngine(EngineConfig(), SLOW)
    await whole(engine, ask(max_tokens=11))
    assert engine.stats()["engine_steps"] == len(pauses) == 11
    assert sum(pauses) == pytest.approx(11 * (SLOW.step_s + SLOW.between_s))
    await engine.close()


async def test_leaving_frees_everything() -> None:
    engine = SimulatedEngine(EngineConfig.of(kv_blocks=64, max_running=1), SLOW)
    for after in (1, 3):
        stream = engine.stream(ask(pictures=(picture(),), max_tokens=500))
        async with aclosing(stream):
            for _ in range(after):
                await anext(stream)
            waiting = asyncio.create_task(whole(engine, ask(name="b", max_tokens=500)))
            while not engine.stats()["requests_waiting"]:
                await asyncio.sleep(0.01)
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(
            engine.loop.call, lambda: None
        )  # cancellations entered the inbox before this call
        stats = engine.stats()
        assert stats["requests_running"] == stats["requests_waiting"] == stats["kv_blocks_used"] == 0
        engine.scheduler.check_integrity()
        assert engine.admission.in_flight == 0
        assert not len(engine.filler)
    await engine.close()


async def test_a_second_request_with_a_running_id_is_refused_and_the_first_continues(
    engine: SimulatedEngine,
) -> None:
    alone = await whole(engine, ask(max_tokens=300))
    running = asyncio.create_task(whole(engine, ask(max_tokens=300)))
    while not engine.loop.board.jobs:
        await asyncio.sleep(0.001)
    with pytest.raises(InvalidRequest, match="request 'a' is running already"):
        await whole(engine, ask("another question", max_tokens=2))
    assert (await running).text == alone.text
    assert not len(engine.filler)


async def test_many_at_once_are_all_served(engine: SimulatedEngine) -> None:
    asks = [ask(f"question {n}", name=str(n), max_tokens=1 + n % 7) for n in range(40)]
    answers = await asyncio.gather(*(whole(engine, request) for request in asks))
    assert [answer.usage.completion for answer in answers] == [1 + n % 7 for n in range(40)]


async def test_requests_that_cannot_run_get_an_error(engine: SimulatedEngine) -> None:
    with pytest.raises(PromptTooLong, match="the context holds 1024"):
        await whole(engine, ask("far too long " * 900))
    with pytest.raises(
        PromptTooLong,
        match="max_tokens is 5000, but after the prompt's 12 tokens the context of 1024 has room for 1012",
    ):
        await whole(engine, ask(max_tokens=5000))
    with pytest.raises(InvalidRequest, match="no logprobs"):
        await whole(engine, ask(logprobs=True))


async def test_deadlines_and_full_queues_are_errors() -> None:
    engine = SimulatedEngine(EngineConfig.of(max_running=1, max_queue=1), SLOW)
    with pytest.raises(DeadlineExceeded):
        await whole(engine, ask(max_tokens=1000, timeout=0.1))
    running = [asyncio.create_task(whole(engine, ask(name=str(n), max_tokens=1000))) for n in range(2)]
    while len(engine.loop.board.jobs) < 2:
        await asyncio.sleep(0.01)
    with pytest.raises(Overloaded, match="2 choices are running or waiting; at most 2 may"):
        await whole(engine, ask(name="c"))
    with pytest.raises(InvalidRequest, match="at most 2 may run and wait here"):
        engine.check_room(3)
    await engine.close()
    for task in running:
        with pytest.raises(Unavailable):
            await task
    assert engine.status == "stopped"
    with pytest.raises(Unavailable):
        engine.check_room(1)


async def test_a_request_still_in_preparation_does_not_enter_a_closed_engine() -> None:
    engine = SimulatedEngine(EngineConfig(), SLOW)
    late = asyncio.create_task(whole(engine, ask(max_tokens=1000)))
    await asyncio.sleep(0)
    assert engine.admission.in_flight == 1
    assert not engine.loop.board.jobs
    await engine.close()
    with pytest.raises(Unavailable):
        await late


async def test_a_drain_lets_answers_end() -> None:
    engine = SimulatedEngine(EngineConfig(), FAST)
    running = asyncio.create_task(whole(engine, ask(max_tokens=50)))
    await asyncio.sleep(0)
    await engine.close(drain_s=30)
    assert (await running).usage.completion == 50


async def test_a_failing_step_ends_its_requests_and_the_engine_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SimulatedEngine(EngineConfig(), FAST)
    errors = iter([RuntimeError("on purpose")])
    execute = engine.loop.stepper.executor.execute

    def broken(*arguments: Any) -> Any:
        for error in errors:
            raise error
        return execute(*arguments)

    monkeypatch.setattr(engine.loop.stepper.executor, "execute", broken)
    with pytest.raises(EngineError, match="the request failed inside the engine"):
        await whole(engine, ask())
    assert engine.stats()["failed_steps"] == 1
    assert (await whole(engine, ask(max_tokens=3))).usage.completion == 3
    await engine.close()


async def test_a_defect_of_the_loop_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimulatedEngine(EngineConfig(), FAST)

    def broken(*_: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(engine.loop.stepper, "plan", broken)
    with pytest.raises(EngineError, match="stopped unexpectedly"):
        await whole(engine, ask())
    assert engine.status == "stopped"


async def test_its_figures_have_names_of_metrics(engine: SimulatedEngine) -> None:
    assert set(engine.stats()) <= FIGURES


def test_prompts_are_those_of_the_real_tokenizer() -> None:
    folder = bundled_model()
    assert folder == FOLDER
    real, (plain, _) = load_tokenizer(folder, read_config(folder)), load_prompt_builder()
    messages = (
        Message("system", (TextPart("Be brief."),)),
        Message(
            "user",
            (ImagePart(picture()), TextPart("what's  this?\n\n")),
        ),
        Message("assistant", (TextPart("a red star"),)),
        Message("user", (TextPart("und größer? \N{PARTY POPPER}"),)),
    )
    text = real.render(messages)
    assert plain.render(messages) == text
    assert plain.encode(text) == real.encode(text)
    assert plain.decode(real.encode(text)) == real.decode(real.encode(text))
    assert (plain.eos_ids, plain.vocab_size) == (real.eos_ids, real.vocab_size)
    assert [plain.token_bytes(token) for token in range(768)] == [
        real.token_bytes(token) for token in range(768)
    ]


def test_the_simulated_engine_needs_no_torch() -> None:
    code = (
        "import sys, fovea.engine.simulate.serving as s; from fovea.engine.config import EngineConfig as C; "
    )
    code += (
        "s.SimulatedEngine(C(), s.CostModel()); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert process.stdout.split() == ["False", "False"]


async def test_fewer_visual_tokens() -> None:
    """Once, a simulated server accepted the policy `visual_tokens` and did not follow it."""
    engine = SimulatedEngine(EngineConfig.of(kv_blocks=64, visual_tokens="dart:0.25"), FAST)
    large, builder = picture(side=512), AnswerBuilder(1)
    async with aclosing(engine.stream(ask(pictures=(large,), max_tokens=2))) as deltas:
        async for delta in deltas:
            builder.add(delta)
    (use,) = builder.build().images
    assert (use.method, use.tokens) == ("dart", -(-(use.full or 0) // 4))
    await engine.close()


async def test_a_client_that_does_not_read_gives_its_place_back(engine: SimulatedEngine) -> None:
    """The place belongs to the answer, not to the client who reads it."""
    stream = engine.stream(ask(max_tokens=5))
    await anext(stream)
    async with asyncio.timeout(20):
        while engine.admission.in_flight:
            await asyncio.sleep(0.001)
    assert [delta.finish_reason async for delta in stream][-1] == "length"


async def test_a_request_that_would_be_late_is_refused_or_loses_detail() -> None:
    costly = replace(FAST, visual_s=0.005)
    for when_late in ("refuse", "degrade"):
        config = EngineConfig.of(kv_blocks=512, target_ttft_ms=1500, when_late=when_late)
        engine = SimulatedEngine(config, costly)
        await whole(engine, ask(pictures=(picture("a", 96),), max_tokens=2))
        large = ask(pictures=(picture("b", 448),), max_tokens=2)
        first = asyncio.create_task(whole(engine, ask(name="text", max_tokens=200)))
        await asyncio.sleep(0.02)
        if when_late == "refuse":
            with pytest.raises(Overloaded, match=r"target of 1\.5 s.*images to encode") as caught:
                await whole(engine, large)
            assert caught.value.retry_after >= 1
        else:
            images = (await whole(engine, large)).images
            assert "lowered so that the first token is in time" in images[0].reason
        stats = engine.stats()
        assert stats["requests_refused_late"] == (when_late == "refuse")
        assert stats["requests_degraded_late"] == (when_late == "degrade")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await engine.close()
