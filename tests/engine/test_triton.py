"""A whole model on the Triton kernels, in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.types import ChatPrompt
from fovea.kernels import flash
from tests.support import fake_flashinfer
from tests.support.checkpoints import parts, write
from tests.support.engines import ask, assert_idle, picture
from tests.support.thorough import is_thorough, others_slow

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a card: tests/gpu runs them on it", allow_module_level=True)

SETTINGS = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_blocks": 64}


def test_a_model_gives_the_answers_of_torchs_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that normalises queries and keys, and adds features of the image after layers."""
    monkeypatch.setattr(parts, "TEXT_LAYERS", 2)
    folder = str(write("qwen3_vl", tmp_path))
    prompts = [ask("what is it?", picture(1, 32, 32))]
    if is_thorough():
        prompts.append(ask("the red circle"))
    answers = {}
    for kernels in ("torch", "triton"):
        with Engine.from_pretrained(folder, **SETTINGS, kernels=kernels) as engine:
            answers[kernels] = [say(engine, prompt) for prompt in prompts]
            assert_idle(engine)
    assert answers["triton"] == answers["torch"]


@pytest.mark.parametrize("family", others_slow(["gemma3", "gemma4", "qwen3_5"], ["gemma3", "qwen3_5"]))
def test_a_model_with_other_layers_gives_the_answers_of_torchs_kernels(family: str, tmp_path: Path) -> None:
    """Windows, norms on both sides, values with norms, keys of other layers, gates, partly rotated heads."""
    folder, answers = str(write(family, tmp_path)), {}
    settings: dict[str, Any] = {**SETTINGS, "block_size": 4, "max_step_tokens": 48}
    for kernels in ("torch", "triton"):
        with Engine.from_pretrained(folder, **settings, kernels=kernels) as engine:
            answers[kernels] = engine.generate(
                ask("the red circle is left of the blue square"), temperature=0, max_tokens=6, ignore_eos=True
            ).token_ids
            assert_idle(engine)
    assert answers["triton"] == answers["torch"]


@pytest.mark.slow
def test_a_model_gives_the_same_answers_with_flashinfers_prompt_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of at most 8 tokens, so that chunks follow others. The library is a stand-in."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flash, "HEAD_DIMS", (16,))
    monkeypatch.setattr(flash, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(parts, "TEXT_LAYERS", 2)
    settings: dict[str, Any] = {**SETTINGS, "dtype": "float16", "max_step_tokens": 8}
    folder, prompt, answers = str(write("qwen3_vl", tmp_path)), ask("what is it?", picture(1, 32, 32)), {}
    for kernels in ("triton", "flashinfer"):
        with Engine.from_pretrained(folder, **settings, kernels=kernels) as engine:
            answers[kernels] = say(engine, prompt)
            chunks = engine.runner.model.kernels._chunks
            plans = chunks._wrapper.plans if kernels == "flashinfer" else 0
            assert_idle(engine)
    assert answers["flashinfer"] == answers["triton"]
    assert plans > 3, "one plan for the trial, and one for each step with a chunk"


def say(engine: Engine, prompt: ChatPrompt) -> tuple[int, ...]:
    return engine.generate(prompt, temperature=0, max_tokens=2, ignore_eos=True).token_ids[0]
