"""Answers are equal whether or not steps are launched ahead.

Here the device is a CPU, so all is computed at once, by the same code: a step reads its tokens from a tensor,
and the host learns them a step later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea import Engine
from fovea.core.constraints import AnswerFormat
from fovea.core.errors import DeadlineExceeded
from fovea.core.sampling import SamplingParams
from fovea.core.types import ChatPrompt, Completion
from fovea.engine.execute.runner import LaunchedStep, Runner
from fovea.engine.schedule.plan import StepPlan
from fovea.engine.sequence import Drafts, Sequence
from tests.support import fake_cuda
from tests.support.brains import scheduler as make_scheduler
from tests.support.brains import sequence
from tests.support.engines import SETTINGS, all_at_once, ask, assert_idle, picture, shared_model

Request = tuple[ChatPrompt, dict[str, Any]]
REQUESTS: list[Request] = [
    (ask("what is it?", picture(1)), {"temperature": 0, "max_tokens": 12, "ignore_eos": True}),
    (ask("what is it?", picture(1)), {"temperature": 0.9, "seed": 5, "max_tokens": 17, "n": 2}),
    (ask("the red circle"), {"temperature": 1.0, "seed": 7, "top_k": 20, "max_tokens": 30, "min_tokens": 20}),
    (ask("please"), {"temperature": 0, "max_tokens": 14, "logprobs": True, "top_logprobs": 3}),
    (ask("is in the image"), {"temperature": 1.2, "seed": 9, "max_tokens": 25, "logit_bias": {5: 3.0}}),
]  # fmt: skip
SLOWER: list[Request] = [
    (ask("describe"), {"temperature": 0, "max_tokens": 9, "repetition_penalty": 1.3}),
    (ask("tell"), {"temperature": 0, "max_tokens": 8, "format": AnswerFormat("regex", "[a-z]{3,9}")}),
    (ask("say it"), {"temperature": 1.0, "seed": 3, "max_tokens": 11, "bad_words": ["a", "the"]}),
]  # fmt: skip
"""Requests for which the host must know each token before it chooses the next."""


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows of the steps that were launched ahead."""
    rows: list[int] = []
    follow = Runner.follow

    def note(self: Runner, launched: LaunchedStep, plan: StepPlan) -> LaunchedStep | None:
        result = follow(self, launched, plan)
        if result is not None:
            rows.append(len(plan.work))
        return result

    monkeypatch.setattr(Runner, "follow", note)
    return rows


@contextmanager
def machine(folder: Path, *, ahead: bool, **settings: Any) -> Iterator[Engine]:
    """An engine that chooses tokens as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "runs_ahead", property(lambda self: ahead))
        with Engine(shared_model(folder), settings_of(settings)) as engine:
            engine.runner.sampler._batched = True
            yield engine


def settings_of(settings: dict[str, Any]) -> Any:
    from fovea.engine.config import EngineConfig

    return EngineConfig.of(**{**SETTINGS, **settings})


def answers(engine: Engine, requests: list[Request]) -> list[Completion]:
    with ThreadPoolExecutor(len(requests)) as pool:
        with all_at_once(engine, len(requests)):
            futures: list[Future[Completion]] = [
                pool.submit(engine.generate, prompt, **options) for prompt, options in requests
            ]
        return [future.result() for future in futures]


def content(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.texts, completion.finish_reasons


@pytest.mark.parametrize("requests", [REQUESTS, REQUESTS + SLOWER], ids=["simple", "all kinds"])
def test_answers_are_equal(requests: list[Request], qwen: Path, followed: list[int]) -> None:
    with machine(qwen, ahead=False) as engine:
        expected = answers(engine, requests)
        assert not followed
    with machine(qwen, ahead=True) as engine:
        for mine, theirs in zip(answers(engine, requests), expected, strict=True):
            assert content(mine) == content(theirs)
        assert_idle(engine)
    assert len(followed) > 5
    assert max(followed) == 1 + len(REQUESTS) if requests is REQUESTS else max(followed) > 0


def test_answers_are_equal_with_sliding_windows(windowed: Path, followed: list[int]) -> None:
    """The window leaves blocks behind while a step that was launched ahead runs."""
    requests: list[Request] = [
        (ask("what is it?", picture(1, 56, 56)), {"temperature": 0, "max_tokens": 60, "ignore_eos": True}),
        (ask("tell"), {"temperature": 0.9, "seed": 3, "max_tokens": 50, "ignore_eos": True}),
    ]
    found = []
    for ahead in (False, True):
        with machine(windowed, ahead=ahead, block_size=4, max_step_tokens=64) as engine:
            found.append([content(each) for each in answers(engine, requests)])
            engine.check_integrity()
            found.append([content(each) for each in answers(engine, requests)])  # from the prefix cache
    assert found[0] == found[1] == found[2] == found[3]
    assert len(followed) > 50


def test_a_step_ahead_that_does_not_fit_into_memory_is_computed_later(
    qwen: Path, followed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    request: list[Request] = [(ask("what is it?"), {"temperature": 0, "max_tokens": 12, "ignore_eos": True})]
    with machine(qwen, ahead=False) as engine:
        expected = answers(engine, request)
    forward, calls = Runner._forward, []

    def full(self: Runner, work: Any, rows: Any, on_device: Any = None) -> Any:
        calls.append(on_device is not None)
        if sum(calls) == 3 and on_device is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, work, rows, on_device)

    monkeypatch.setattr(Runner, "_forward", full)
    with machine(qwen, ahead=True) as engine:
        assert [content(each) for each in answers(engine, request)] == [content(each) for each in expected]
        assert engine.stats()["memory_retries"] == 0
        assert_idle(engine)
    assert len(followed) > 5, "later steps are launched ahead again"


def test_a_preempted_answer_is_equal(qwen: Path, followed: list[int]) -> None:
    requests: list[Request] = [
        (ask("what is it " * 6, picture(number)), {"temperature": 0, "max_tokens": 40, "ignore_eos": True})
        for number in range(3)
    ]
    settings = {"kv_blocks": 40, "block_size": 4, "prefix_cache": False}
    with machine(qwen, ahead=False) as engine:
        expected = [engine.generate(prompt, **options) for prompt, options in requests]
    with machine(qwen, ahead=True, **settings) as engine:
        mine = answers(engine, requests)
        assert engine.stats()["preemptions"] > 0
        assert_idle(engine)
    assert [content(each) for each in mine] == [content(each) for each in expected]
    assert followed


def test_the_prefix_cache_has_the_true_tokens(qwen: Path, followed: list[int]) -> None:
    """Blocks are named by their tokens, which the host does not know yet when a step is launched ahead."""
    options: dict[str, Any] = {"temperature": 0.9, "seed": 1, "max_tokens": 40, "ignore_eos": True}
    with machine(qwen, ahead=True, block_size=4) as engine:
        request = engine.request(ask("what is it?"), **options)
        first = engine.generate(replace(request, return_prompt_ids=True))
        assert len(followed) > 30
        prompt = len(first.prompt_ids)
        whole = Sequence("whole", [*first.prompt_ids, *first.token_ids[0]], SamplingParams(), 1)
        found = engine.loop.stepper.scheduler.kv.cached_prefix(whole)
        assert found == (prompt + 40 - 1) // 4 * 4


def test_a_client_that_leaves_and_a_deadline_end_a_step_that_runs(qwen: Path, followed: list[int]) -> None:
    long = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True}
    with machine(qwen, ahead=True) as engine:
        deltas = engine.iterate(engine.request(ask("what is it?"), **long))
        for _ in range(5):
            next(deltas)
        deltas.close()
        with pytest.raises(DeadlineExceeded):
            engine.generate(ask("please"), timeout=0.3, **long)
        deadline = time.monotonic() + 30
        while engine.unfinished and time.monotonic() < deadline:
            time.sleep(0.01)
        assert_idle(engine)
    assert followed


def test_a_step_that_cannot_be_launched_ahead_is_computed_later(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    request: list[Request] = [(ask("what is it?"), {"temperature": 0, "max_tokens": 9, "ignore_eos": True})]
    with machine(qwen, ahead=False) as engine:
        expected = answers(engine, request)
    calls: list[int] = []

    def broken(self: Runner, launched: LaunchedStep, plan: StepPlan) -> None:
        calls.append(1)
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(Runner, "follow", broken)
    with machine(qwen, ahead=True) as engine:
        assert [content(each) for each in answers(engine, request)] == [content(each) for each in expected]
        assert_idle(engine)
    assert len(calls) == 1
    assert "from now on each waits for the one before" in caplog.text


def test_a_step_that_fails_takes_the_one_after_it_along(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are tried again, and the answer is that of a run without the error."""
    request: list[Request] = [
        (ask(text), {"temperature": 0.8, "seed": 2, "max_tokens": 12, "ignore_eos": True})
        for text in ("what is it?", "please")
    ]
    with machine(qwen, ahead=False) as engine:
        expected = answers(engine, request)
    finish, calls = Runner.finish, []

    def broken(self: Runner, launched: LaunchedStep) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("a kernel failed")
        return finish(self, launched)

    monkeypatch.setattr(Runner, "finish", broken)
    with machine(qwen, ahead=True) as engine:
        assert [content(each) for each in answers(engine, request)] == [content(each) for each in expected]
        assert engine.loop.failed_steps == 1
        assert_idle(engine)
    assert "a kernel failed" in caplog.text


@pytest.mark.kernels
@pytest.mark.slow
def test_recorded_steps_take_their_tokens_from_the_step_before(qwen: Path, followed: list[int]) -> None:
    """With padded batches, as CUDA graphs replay them: their inputs lie in two buffers, used in turn."""
    pytest.importorskip("triton", reason="triton is not installed")
    settings = {
        "kernels": "triton",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "kv_blocks": 64,
        "max_running": 2,
    }
    options = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    found = []
    for ahead in (False, True):
        with pytest.MonkeyPatch.context() as patch, fake_cuda.installed(graphs=True):
            patch.setattr(Runner, "runs_ahead", property(lambda self, ahead=ahead: ahead))
            with Engine.from_pretrained(str(qwen), **settings, decode_graphs="padded") as engine:
                engine.runner.sampler._batched = True
                found.append([content(each) for each in answers(engine, [(ask("the"), options)])])
    assert found[0] == found[1]
    assert followed


def test_the_scheduler_follows_only_a_step_that_is_clear() -> None:
    """Only decodes, nothing waits, and nobody else could join."""
    scheduler = make_scheduler(blocks=8, block_size=4)
    first, second = sequence("a", 4, max_tokens=9), sequence("b", 4, max_tokens=3, arrival=1.0)
    scheduler.add(first)
    plan = scheduler.schedule()
    assert scheduler.follow(plan) is None, "it computes a prompt"
    scheduler.update(plan, {"a": [7]})
    plan = scheduler.schedule()
    ahead = scheduler.follow(plan)
    assert ahead is not None
    assert [(work.seq.id, work.start, work.count) for work in ahead.work] == [("a", 5, 1)]
    scheduler.update(plan, {"a": [8]})
    further = scheduler.follow(ahead)
    assert further is not None
    assert further.work[0].start == 6
    scheduler.add(second)
    assert scheduler.follow(ahead) is None, "another sequence waits"
    scheduler.update(ahead, {"a": [9]})
    plan = scheduler.schedule()
    assert scheduler.follow(plan) is None, "it computes the prompt of b"
    scheduler.update(plan, {"a": [10], "b": [1]})
    plan = scheduler.schedule()
    both = scheduler.follow(plan)
    assert both is not None
    assert [work.seq.id for work in both.work] == ["a", "b"]
    scheduler.update(plan, {"a": [11], "b": [2]})
    last = scheduler.follow(both)
    assert last is not None
    assert [work.seq.id for work in last.work] == ["a"], "b ends with the token that is being computed"
    scheduler.finish(second, "stop")
    assert scheduler.follow(both) is None, "a sequence ended, so another one may join"


def test_nobody_is_preempted_for_a_step_ahead() -> None:
    scheduler = make_scheduler(blocks=2, block_size=4)
    seq = sequence("a", 4, max_tokens=9)
    scheduler.add(seq)
    scheduler.update(scheduler.schedule(), {"a": [1]})
    for token in range(2, 5):
        plan = scheduler.schedule()
        ahead = scheduler.follow(plan)
        assert (ahead is None) == (seq.length == 8)
        scheduler.update(plan, {"a": [token]})
    assert len(seq.blocks) == 2


@torch.inference_mode()
def test_drafts_and_forced_tokens_wait_for_the_host() -> None:
    scheduler = make_scheduler(blocks=8, block_size=4)
    seq = sequence("a", 4, max_tokens=9)
    scheduler.add(seq)
    scheduler.update(scheduler.schedule(), {"a": [1]}, {"a": Drafts.certain([2, 3])})
    assert scheduler.follow(scheduler.schedule()) is None
