"""A whole model on the Triton kernels, in Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fovea import Engine
from fovea.core.types import ChatPrompt
from tests.support.checkpoints import write
from tests.support.engines import ask, at_rest, picture

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a card: tests/gpu runs them on it", allow_module_level=True)

SETTINGS = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_blocks": 64}


def test_a_model_says_what_it_says_on_torchs(tmp_path: Path) -> None:
    """One that normalises queries and keys, and adds features of the image after layers."""
    folder = str(write("qwen3_vl", tmp_path))
    prompts = [ask("what is it?", picture(1, 64, 64)), ask("the red circle")]
    answers = {}
    for kernels in ("torch", "triton"):
        with Engine.from_pretrained(folder, **SETTINGS, kernels=kernels) as engine:
            answers[kernels] = [say(engine, prompt) for prompt in prompts]
            at_rest(engine)
    assert answers["triton"] == answers["torch"]


def say(engine: Engine, prompt: ChatPrompt) -> tuple[int, ...]:
    return engine.generate(prompt, temperature=0, max_tokens=3, ignore_eos=True).token_ids[0]
