"""Draw the images of this folder and write their questions, from held-out seeds of the scene generator.

python examples/make.py            # scenes and questions.jsonl
python examples/make.py --invoice  # invoice.png, with its schema and right values; needs Chromium and fonts

The invoice has a template and a font that no training page has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from fovea.evaluation.documents.chromium import browser
from fovea.evaluation.documents.questions import schema_of
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
INVOICE, INVOICE_SEED = "invoice_summary", "examples/invoice/13"
INVOICE_KEYS = ("invoice_number", "invoice_date", "due_date", "customer", "total")
COLOURS = 64
"""Colours of the invoice's palette, which makes its file small."""


def sample(kind: str, seed: int, size: tuple[int, int]) -> Sample:
    return next(iter(generate(HELD_OUT_SEED + seed, 1, [kind], [size])))


def draw_invoice() -> None:
    with browser(held_out=True) as renderer:
        page = renderer.draw(Random(INVOICE_SEED), INVOICE)
    values = {key: field.value for key in INVOICE_KEYS if (field := page.content.field(key))}
    page.image.quantize(COLOURS).save(HERE / "invoice.png", optimize=True)
    for name, value in (("schema", schema_of(INVOICE_KEYS)), ("values", values)):
        text = json.dumps(value, indent=2, ensure_ascii=False)
        (HERE / f"invoice.{name}.json").write_text(text + "\n")


def main() -> None:
    if "--invoice" in sys.argv[1:]:
        draw_invoice()
        return
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
