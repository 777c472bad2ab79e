"""The bundled model recognizes motion in a video, although it was trained with frames as images."""

from __future__ import annotations

import pytest

from fovea import Engine
from fovea.evaluation.scenes import HELD_OUT_SEED, generate
from fovea.evaluation.score import matches
from tests.support.thorough import is_thorough

pytestmark = pytest.mark.kernels

COUNT = 40 if is_thorough() else 8


def test_motion_is_mostly_recognized() -> None:
    """Among 300 such answers 206 were right. With frames as images, as in training, 270 were right."""
    samples = list(generate(HELD_OUT_SEED, COUNT, ["motion"]))
    right = 0
    with Engine.from_pretrained("fovea-tiny", threads=1) as engine:
        for sample in samples:
            (turn,) = sample.turns
            answer = engine.generate(
                turn.question, videos=[list(sample.images)], temperature=0, max_tokens=24
            )
            right += matches(answer.text, turn.accepted)
    assert right >= COUNT // 2
