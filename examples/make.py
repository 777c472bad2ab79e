"""Draw the images of this folder and write their questions, from held-out seeds of the scene generator.

python examples/make.py
"""

from __future__ import annotations

import json
from pathlib import Path

from fovea.evaluation.scenes import HELD_OUT_SEED, Sample, generate

HERE = Path(__file__).resolve().parent
# file name, kind of question, seed above HELD_OUT_SEED, (width, height) in pixels
PICTURES: tuple[tuple[str, str, int, tuple[int, int]], ...] = (
    ("shapes", "counting", 1, (320, 256)),
    ("corner", "position", 2, (256, 256)),
    ("colours", "colour", 3, (384, 224)),
    ("sign", "reading", 4, (416, 288)),
    ("page", "reading", 5, (896, 640)),
    ("list", "listing", 6, (256, 320)),
    ("form", "json", 7, (320, 320)),
    ("nothing", "refusal", 8, (256, 192)),
    ("pair", "compare", 9, (192, 192)),
    ("frames", "motion", 10, (192, 192)),
)


def sample(kind: str, seed: int, size: tuple[int, int]) -> Sample:
    return next(iter(generate(HELD_OUT_SEED + seed, 1, [kind], [size])))


def main() -> None:
    lines = []
    for name, kind, seed, size in PICTURES:
        scene = sample(kind, seed, size)
        several = len(scene.images) > 1
        names = [f"{name}-{i}.png" if several else f"{name}.png" for i in range(1, len(scene.images) + 1)]
        for image, file in zip(scene.images, names, strict=True):
            image.save(HERE / file, optimize=True)
        turn = scene.turns[0]
        lines.append(
            json.dumps(
                {"id": name, "images": names, "question": turn.question, "answers": list(turn.accepted)}
            )
        )
    (HERE / "questions.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
