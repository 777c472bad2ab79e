"""Structured output on CUDA: masks are applied on the device, and forced tokens change nothing."""

from __future__ import annotations

import json

import pytest

from fovea import AnswerFormat
from fovea.evaluation.scenes import HELD_OUT_SEED, generate
from tests.support import gpu

pytestmark = gpu.MARKS


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_answers_follow_their_schema_with_and_without_forced_tokens(temperature: float) -> None:
    """A seed gives the same tokens, however many of them one step computes."""
    answers = []
    for drafts in (0, 16):
        kernels = gpu.either("auto", "torch")  # the answers are too long for Triton's interpreter
        with gpu.engine_of("fovea-tiny", dtype="float32", kernels=kernels, max_draft_tokens=drafts) as engine:
            answers.append(
                [
                    engine.generate(
                        sample.turns[0].question,
                        images=list(sample.images),
                        temperature=temperature,
                        seed=number,
                        max_tokens=160,
                        format=AnswerFormat.json_schema(sample.turns[0].schema or {}),
                    ).text
                    for number, sample in enumerate(generate(HELD_OUT_SEED, gpu.either(12, 1), ["form"]))
                ]
            )
    assert answers[0] == answers[1]
    wanted = [sample.turns[0].schema or {} for sample in generate(HELD_OUT_SEED, gpu.either(12, 1), ["form"])]
    for text, schema in zip(answers[0], wanted, strict=True):
        assert list(json.loads(text)) == list(schema["properties"])
