"""The planner's count of an encoder's rows is the engine's, for every architecture.

Where the number of visual tokens decides all rows they are equal. LARGEST says how far they may be apart
elsewhere: the share of the engine's count, over all rows and pairs of 200 sizes together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fovea.core.errors import InvalidImage
from fovea.core.image import PixelBudget
from fovea.engine.check import shape_of_folder
from fovea.engine.load import build_model, build_processors, read_config
from fovea.planner.vision import encoder_work
from tests.support.checkpoints import ARCHITECTURES
from tests.support.thorough import examples

FIELDS = ("patches", "rows", "projector_rows", "merged_rows", "pairs")
LARGEST: dict[str, float] = {}


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_rows_and_pairs_of_images(architecture: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(architecture)
    config = read_config(folder)
    shape = shape_of_folder(folder)
    model = build_model(folder, config, torch.device("meta"), torch.bfloat16)
    processor, _ = build_processors(folder, config)
    draw, seen = random.Random(architecture), 0
    worst = dict.fromkeys(FIELDS, 0.0)
    while seen < examples(200):
        width, height = (draw.randint(1, draw.choice((64, 700, 2000))) for _ in range(2))
        try:
            plan = processor.plan(width, height, PixelBudget())
        except InvalidImage:
            continue
        seen += 1
        theirs = model.visual_shape(plan)
        ours = encoder_work(shape, plan.rows, width / height)
        assert shape.tower.hidden == theirs.hidden
        for name in FIELDS:
            a, b = getattr(theirs, name), getattr(ours, name)
            off = abs(b / a - 1) if a else b
            worst[name] = max(worst[name], off)
    print(architecture, {k: f"{v:.1%}" for k, v in worst.items() if v > 1e-9})
    assert max(worst.values()) <= LARGEST.get(architecture, 1e-9)
