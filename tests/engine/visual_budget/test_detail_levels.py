"""Tests of detail levels and admission on a real engine: decisions, reported reasons, and refusals."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.errors import Overloaded
from fovea.core.media import ImageUse, PixelBudget
from fovea.engine.config import EngineConfig
from fovea.engine.visual_budget.detail import LevelDecision
from tests.support.engines import SETTINGS, ask, assert_idle, engine, picture, shared_model

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
LARGE = picture(3, 672, 512)


BUNDLED = Path("fovea-tiny")
"""It has up to some thousand tokens per image. The random checkpoint has too few for several levels."""


@pytest.fixture(scope="module")
def by_keywords() -> Iterator[Engine]:
    with engine(BUNDLED, detail_policy="keywords") as machine:
        yield machine


def test_the_question_decides_and_the_answer_reports_it(
    by_keywords: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fovea.engine")
    uses = {
        question: by_keywords.generate(ask(question, LARGE), **GREEDY).images[0]
        for question in ("Is it nice?", "How many are there?", "Read it.")
    }
    low, medium, high = uses.values()
    assert (low.detail, medium.detail, high.detail) == ("low", "medium", "high")
    assert low.tokens <= 64 < medium.tokens <= 256 < high.tokens
    assert "'many'" in medium.reason
    assert "image 0 at medium" in caplog.text
    assert_idle(by_keywords)


def test_every_image_has_its_own_level(by_keywords: Engine) -> None:
    answer = by_keywords.generate(ask("Is it nice?", LARGE, LARGE, budget=PixelBudget("high")), **GREEDY)
    assert [(image.detail, image.reason) for image in answer.images] == [
        ("high", "the request sets the detail level")
    ] * 2
    by_pixels = by_keywords.generate(ask("Is it?", LARGE, budget=PixelBudget(max_pixels=100_000)), **GREEDY)
    assert by_pixels.images[0].detail == "pixels"


def test_levels_of_one_size_share_one_cache_entry(by_keywords: Engine) -> None:
    """A cache key has the size in pixels, not the level. A small image has the same size at all levels."""
    before = by_keywords.stats()["images_encoded"]
    for question in ("Is it nice?", "How many are there?", "Read it."):
        by_keywords.generate(ask(question, picture(5)), **GREEDY)
    assert by_keywords.stats()["images_encoded"] == before + 1


def test_the_default_is_the_models_own_resolution() -> None:
    with engine(BUNDLED) as plain:
        answer = plain.generate(ask("Is it nice?", LARGE), **GREEDY)
        explicit = plain.generate(ask("Is it nice?", LARGE, budget=PixelBudget("high")), **GREEDY)
    assert answer.token_ids == explicit.token_ids
    assert answer.images[0].detail == "high"
    assert answer.images[0].tokens == explicit.images[0].tokens


def test_a_custom_policy(qwen: Path) -> None:
    class AlwaysLow:
        def choose(self, question: str) -> LevelDecision:
            return LevelDecision("low", f"{len(question)} characters are no reason to look")

    with Engine(shared_model(qwen), EngineConfig.of(**SETTINGS), detail_policy=AlwaysLow()) as machine:
        answer = machine.generate(ask("Read it.", LARGE), **GREEDY)
    assert answer.images == (ImageUse("low", answer.images[0].tokens, "8 characters are no reason to look"),)


def test_load_lowers_only_auto() -> None:
    with engine(BUNDLED, degrade_from=0.5, kv_blocks=100) as machine:
        idle = machine.generate(ask("Read it.", LARGE), **GREEDY).images[0]
        running = machine.iterate(machine.request(ask("And?"), max_tokens=1000, ignore_eos=True))
        next(running)
        under_load = machine.generate(ask("Read it.", LARGE), **GREEDY).images[0]
        explicit = machine.generate(ask("Read it.", LARGE, budget=PixelBudget("high")), **GREEDY).images[0]
        running.close()
        assert_idle(machine)
        after = machine.generate(ask("Read it.", LARGE), **GREEDY).images[0]
    assert idle.detail == explicit.detail == after.detail == "high"
    assert under_load.detail in ("medium", "low")
    assert "lowered at a load of" in under_load.reason
    assert under_load.tokens < idle.tokens


def test_a_refusal_for_lack_of_room_has_numbers(qwen: Path) -> None:
    with engine(qwen, when_full="refuse", kv_blocks=100) as machine:
        running = machine.iterate(machine.request(ask("And?"), max_tokens=1500, ignore_eos=True))
        next(running)
        with pytest.raises(Overloaded, match=r"MiB of KV \(.* tokens of prompt, .* of them visual") as caught:
            machine.generate(ask("Read it.", LARGE), **GREEDY)
        assert caught.value.retry_after
        running.close()
        assert_idle(machine)
        assert machine.generate(ask("Read it.", LARGE), **GREEDY).text
        assert_idle(machine)


def test_pixels_that_find_no_room_are_refused_too(qwen: Path) -> None:
    with engine(qwen, when_full="refuse", pixel_pool_mib=1) as machine:
        held = machine.parts.preparer.reserve(
            machine.parts.preparer.build(machine.request(ask("?", LARGE)), machine.info)
        )
        with pytest.raises(Overloaded, match="MiB of processed pixels"):
            machine.generate(ask("?", picture(8, 640, 640)), **GREEDY)
        held.release()
        assert machine.generate(ask("?", picture(8, 640, 640)), **GREEDY).text
        assert_idle(machine)
