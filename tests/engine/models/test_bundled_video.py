"""The bundled model sees motion in frames that come as a video, though it was trained on frames as images."""

from __future__ import annotations

from fovea import Engine
from fovea.evaluation.scenes import HELD_OUT_SEED, generate
from fovea.evaluation.score import matches


def test_motion_is_mostly_seen() -> None:
    """Of the first 300 such questions 206 were right, and 270 where the frames came as images, as in training."""
    samples = list(generate(HELD_OUT_SEED, 40, ["motion"]))
    right = 0
    with Engine.from_pretrained("fovea-tiny", threads=1) as engine:
        for sample in samples:
            (turn,) = sample.turns
            answer = engine.generate(
                turn.question, videos=[list(sample.images)], temperature=0, max_tokens=24
            )
            right += matches(answer.text, turn.accepted)
    assert right >= 20
