"""Gemma 4 whose image tokens see each other (26B, 31B): answers equal those of transformers, in float32."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.types import ChatPrompt
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model
from tests.engine.models.test_parity import TOKENS, assert_same, chat, picture
from tests.support.checkpoints import write
from tests.support.engines import SETTINGS, all_at_once, assert_idle
from tests.support.reference import Reference
from tests.support.thorough import is_thorough

STEPS: list[dict[str, Any]] = [
    {"max_step_tokens": 7},
    {"max_step_tokens": 16, "block_size": 4, "kv_blocks": 340},
    {"max_step_tokens": 11, "prefix_cache": False},
]


def answer(machine: Engine, prompt: ChatPrompt) -> tuple[int, ...]:
    return machine.generate(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True).token_ids[0]


@pytest.mark.parametrize("window", [24, *(pytest.param(size, marks=pytest.mark.slow) for size in (7, 200))])
def test_answers_equal_those_of_transformers(window: int, tmp_path: Path) -> None:
    """The images have 65 and 66 tokens: more than two of the windows. Steps are shorter than the images."""
    folder = write("gemma4", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"use_bidirectional_attention": "vision", "sliding_window": window}
    (folder / "config.json").write_text(json.dumps(config))
    reference, model = Reference(folder), load_model(str(folder), EngineConfig.of(**SETTINGS))
    first, second = picture(140, 80, 1), picture(70, 190, 2)
    cases = [
        (chat(("user", [first, second], "compare them")), [first, second]),
        (
            chat(
                ("user", [first], "what is it?"),
                ("assistant", [], "a circle"),
                ("user", [second], "here?"),
            ),
            [first, second],
        ),
        (chat(("user", [second], "what is it?")), [second]),
    ]
    prompts = [prompt for prompt, _ in cases] * 2
    with Engine(model, EngineConfig.of(**SETTINGS)) as machine:
        for prompt, images in cases:
            assert_same(machine, reference, prompt, images)
        expected = [answer(machine, prompt) for prompt, _ in cases] * 2
    for settings in STEPS if is_thorough() else STEPS[1:]:
        with Engine(model, EngineConfig.of(**{**SETTINGS, **settings})) as machine:
            for _ in range(2 if settings.get("prefix_cache", True) else 1):
                with ThreadPoolExecutor(6) as pool, all_at_once(machine, 6):
                    assert list(pool.map(partial(answer, machine), prompts)) == expected
            assert_idle(machine)
