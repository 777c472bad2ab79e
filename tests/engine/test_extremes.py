"""Values at and beyond every edge, sent to a real engine: each is answered or refused, others notice nothing.

The server checks most of these values before the engine sees them. The engine does not rely on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.errors import RequestError
from fovea.core.media import PixelBudget, VideoBudget, VisualTokens, video_of_images
from fovea.core.types import ChatPrompt, GenerationRequest, Message, Prompt, TextPart, TokenPrompt, VideoPart
from tests.support.engines import ask, assert_idle, engine, picture

NAN, INF, HUGE, TINY = math.nan, math.inf, 2**31, 5e-324
ALL_IDS = tuple(range(384))
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1, "repetition_penalty": 1e-300, "min_p": 0.1},
    {"temperature": 1, "repetition_penalty": 0.01, "min_p": 0.1},
    {"temperature": 1e-300, "top_p": TINY, "min_p": TINY, "top_k": HUGE},
    {"temperature": TINY, "repetition_penalty": 10.0},
    {"temperature": 2.0, "presence_penalty": -2.0, "frequency_penalty": -2.0},
    {"temperature": NAN},
    {"top_p": NAN},
    {"min_p": INF},
    {"repetition_penalty": NAN},
    {"repetition_penalty": INF},
    {"repetition_penalty": -1.0},
    {"presence_penalty": NAN},
    {"frequency_penalty": INF},
    {"temperature": 10**400},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"seed": 2**63},
    {"seed": 10**400},
    {"top_k": 2**64},
    {"n": 16},
    {"n": HUGE},
    {"n": -1},
    {"max_tokens": HUGE},
    {"max_tokens": 10**400},
    {"max_tokens": 0},
    pytest.param({"max_tokens": None, "min_tokens": HUGE}, marks=pytest.mark.slow),
    {"max_tokens": None, "min_tokens": HUGE, "ignore_eos": True, "stop": ("a",)},
    {"min_tokens": 10**400},
    {"min_tokens": 4, "stop_token_ids": ALL_IDS[:64]},
    {"min_tokens": 4, "stop_token_ids": ALL_IDS},
    {"stop_token_ids": (-1,)},
    {"stop_token_ids": (HUGE,)},
    {"stop_token_ids": (2**70,)},
    {"stop": ("x" * 4096,) * 16},
    {"stop": tuple("a" * length + "b" for length in range(4000, 4016))},
    {"stop": ("x" * 4097,)},
    {"stop": ("\ud800",)},
    {"stop": ("\x00",)},
    {"stop": (b"x",)},
    {"logprobs": True, "top_logprobs": 20, "logit_bias": dict.fromkeys(ALL_IDS, -100.0)},
    {"logprobs": True, "top_logprobs": HUGE},
    {"logit_bias": dict.fromkeys(ALL_IDS, 100.0), "repetition_penalty": 0.01, "temperature": 1e-30},
    {"logit_bias": {5: NAN}},
    {"logit_bias": {5: INF}},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {HUGE: 1.0}},
    {"logit_bias": {2**70: 1.0}},
]
REQUESTS: list[dict[str, Any]] = [
    {"timeout": NAN},
    {"timeout": INF},
    {"timeout": -INF},
    {"timeout": -1.0},
    {"timeout": 0.0},
    {"timeout": TINY},
    {"timeout": 1e9},
    {"timeout": 1e300},
    {"timeout": 10**400},
    {"priority": 10**400},
    {"priority": -(10**400)},
    {"priority": NAN},
    {"cache_salt": "s" * 1024},
    {"cache_salt": "s" * 1025},
    {"cache_salt": "\ud800"},
    {"cache_salt": "\x00fovea-kv:0:"},
    {"usual_tokens": HUGE},
]
BUDGETS: list[dict[str, Any]] = [
    {"max_pixels": 1},
    {"max_pixels": HUGE},
    {"max_pixels": 10**400},
    {"min_pixels": HUGE},
    {"min_pixels": 10**400},
    {"min_pixels": 100_000, "max_pixels": 10_000},
    {"min_pixels": 0},
    {"max_pixels": -1},
    {"max_pixels": NAN},
    {"detail": "endless"},
    {"visual": ("dart", {"keep": TINY})},
    {"visual": ("dart", {"budget": HUGE})},
    {"visual": ("dart", {"budget": 10**400})},
    {"visual": ("views", {"budget": 1})},
    {"visual": ("relevance", {"keep": 1e-300})},
    {"visual": ("dpp", {"keep": NAN})},
    {"visual": ("tome", {"keep": 1e-9})},
    {"visual": ("unknown", {})},
]
VIDEOS: list[dict[str, Any]] = [
    {"fps": TINY},
    {"fps": 240.0},
    {"fps": INF},
    {"fps": NAN},
    {"fps": 10**400},
    {"min_frames": 4096},
    {"max_frames": 1},
    {"max_frames": 10**400},
    {"min_frames": 9, "max_frames": 2},
    {"max_pixels": 1},
    {"max_pixels": 10**400},
    {"pruning_rate": 0.95},
    {"pruning_rate": NAN},
    {"pruning_rate": 1.0},
    {"min_frames": -1},
]
SHORT: dict[str, Any] = {"max_tokens": 3}


@pytest.fixture(scope="module")
def machine(qwen: Path) -> Iterator[Engine]:
    with engine(qwen, max_context=256, policy="priority") as made:
        yield made


def with_image(values: dict[str, Any]) -> Prompt:
    own = dict(values)
    visual = own.pop("visual", None)
    return ask(
        "What is it?",
        picture(7),
        budget=PixelBudget(**own, visual=None if visual is None else VisualTokens(visual[0], **visual[1])),
    )


def with_video(values: dict[str, Any]) -> Prompt:
    part = VideoPart(video_of_images([picture(seed) for seed in range(4)]), VideoBudget(**values))
    return ChatPrompt((Message("user", (part, TextPart("What happens?"))),))


def answered_or_refused(machine: Engine, build: Callable[[], GenerationRequest]) -> str:
    """Run a request. Any other outcome than an answer or a RequestError fails the test."""
    try:
        request = build()
        tokens = [token for delta in machine.iterate(request) for token in delta.token_ids]
    except RequestError:
        return "refused"
    assert 1 <= len(tokens) <= 256 * request.sampling.n
    assert all(0 <= token < 384 for token in tokens)
    return "answered"


def normal_answer(machine: Engine) -> tuple[tuple[int, ...], ...]:
    prompt = ask("the red circle", picture(1))
    return machine.generate(prompt, temperature=0.8, seed=3, max_tokens=8, ignore_eos=True).token_ids


@pytest.fixture(scope="module")
def before(machine: Engine) -> tuple[tuple[int, ...], ...]:
    """The answer to a normal request before all tests."""
    return normal_answer(machine)


@pytest.fixture(autouse=True)
def nothing_changes(machine: Engine, before: tuple[tuple[int, ...], ...]) -> Iterator[None]:
    """After each test, a normal request gets exactly the same answer as before, and nothing leaks."""
    yield
    assert normal_answer(machine) == before
    assert machine.stats()["failed_steps"] == 0
    assert machine.status == "ready"
    assert_idle(machine)


@pytest.mark.parametrize("values", SAMPLING, ids=lambda values: str(values)[:60])
def test_sampling(machine: Engine, values: dict[str, Any]) -> None:
    for prompt in (TokenPrompt((5, 6, 7, 7)), ask("a picture", picture(2))):
        answered_or_refused(
            machine,
            lambda prompt=prompt: GenerationRequest("x", prompt, machine.sampling({**SHORT, **values})),  # type: ignore[misc]
        )


@pytest.mark.parametrize("values", REQUESTS, ids=str)
def test_requests(machine: Engine, values: dict[str, Any]) -> None:
    answered_or_refused(
        machine, lambda: GenerationRequest("x", ask("hello"), machine.sampling(SHORT), **values)
    )


@pytest.mark.parametrize("values", BUDGETS, ids=str)
def test_budgets_of_images(machine: Engine, values: dict[str, Any]) -> None:
    answered_or_refused(machine, lambda: GenerationRequest("x", with_image(values), machine.sampling(SHORT)))


@pytest.mark.parametrize("values", VIDEOS, ids=str)
def test_budgets_of_videos(machine: Engine, values: dict[str, Any]) -> None:
    answered_or_refused(machine, lambda: GenerationRequest("x", with_video(values), machine.sampling(SHORT)))
