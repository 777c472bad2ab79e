"""The planner's count of an encoder's rows is the engine's, for every architecture.

Where the number of visual tokens decides all rows, both are equal. ESTIMATED says how far they may be apart
elsewhere, with the settings of published models.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tools import known_shapes

from fovea.core.errors import InvalidImage
from fovea.core.media import PixelBudget
from fovea.engine.load import build_model, read_config
from fovea.engine.models.side_files import build_processors
from fovea.planner.roofline import encoder_work
from fovea.planner.shape import ModelShape, Tower, find
from tests.support import published
from tests.support.checkpoints import ARCHITECTURES
from tests.support.checkpoints.llava import NEXT_PROCESSOR, ONEVISION_PROCESSOR
from tests.support.thorough import examples

FIELDS = ("patches", "rows", "projector_rows", "merged_rows", "pairs")
PUBLISHED = {
    "lfm2_vl": "LiquidAI/LFM2-VL-450M",
    "lighton_ocr": "lightonai/LightOnOCR-1B-1025",
    "llava_next": "llava-hf/llava-v1.6-mistral-7b-hf",
    "llava_onevision": "llava-hf/llava-onevision-qwen2-7b-ov-hf",
    "minicpmv4_6": "openbmb/MiniCPM-V-4_6",
}
"""Models whose image processor decides how an image is cut. Tiny checkpoints cut into other sizes."""
GRIDS = {
    "llava_next": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "llava_onevision": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
}
ESTIMATED = {
    "lighton_ocr": (0.12, 0.20),
    "llava_next": (0.32, 0.32),
    "llava_onevision": (0.26, 0.26),
    "minicpmv4_6": (1e-9, 0.01),
}
"""Largest mean error of rows and of pairs, as a share of the engine's, where tokens do not decide them."""
NEARLY = 1e-4
"""Queries of DeepSeek-OCR 2 see n (n + 1) / 2 rows, which is taken as n^2 / 2."""


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_rows_and_pairs_of_images(
    architecture: str,
    checkpoint: Callable[[str], Path],
    planned: Callable[[str], ModelShape],
    tmp_path: Path,
) -> None:
    if architecture in PUBLISHED:
        folder, shape = write_published(architecture, tmp_path), find(PUBLISHED[architecture])
        assert shape is not None
    else:
        folder, shape = checkpoint(architecture), planned(architecture)
    errors = differences(architecture, folder, shape)
    rows = max(sum(errors[name]) / len(errors[name]) for name in FIELDS[:4])
    pairs = sum(errors["pairs"]) / len(errors["pairs"])
    if architecture in ESTIMATED:
        assert rows <= ESTIMATED[architecture][0]
        assert pairs <= ESTIMATED[architecture][1]
    else:
        assert max(map(max, errors.values())) <= NEARLY


def differences(architecture: str, folder: Path, shape: ModelShape) -> Mapping[str, list[float]]:
    """Errors of each count as shares of the engine's, for random sizes of images."""
    config = read_config(folder)
    model = build_model(folder, config, torch.device("meta"), torch.bfloat16)
    processor, _ = build_processors(folder, config)
    draw = random.Random(architecture)
    errors: dict[str, list[float]] = {name: [] for name in FIELDS}
    while len(errors["rows"]) < examples(200):
        width, height = (draw.randint(1, draw.choice((64, 700, 2000))) for _ in range(2))
        try:
            plan = processor.plan(width, height, PixelBudget())
        except InvalidImage:
            continue
        theirs = model.visual_shape(plan)
        ours = encoder_work(shape, plan.rows, width / height)
        assert shape.tower.hidden == theirs.hidden
        for name in FIELDS:
            count = getattr(theirs, name)
            errors[name].append(abs(getattr(ours, name) - count) / max(count, 1))
    return errors


def write_published(architecture: str, folder: Path) -> Path:
    """Write the settings of a published model: of tests/published, or those of LLaVA's image processors."""
    name = PUBLISHED[architecture]
    if architecture not in GRIDS:
        return published.write(name.replace("/", "__"), folder)
    grids: dict[str, Any] = {"image_grid_pinpoints": GRIDS[architecture]}
    edge = GRIDS[architecture][0][0]
    sizes = {"size": {"shortest_edge": edge}, "crop_size": {"height": edge, "width": edge}}
    if architecture == "llava_onevision":
        sizes = {"size": {"height": edge, "width": edge}}
    processor = {"llava_next": NEXT_PROCESSOR, "llava_onevision": ONEVISION_PROCESSOR}[architecture]
    (folder / "config.json").write_text(json.dumps({**known_shapes.configuration(name), **grids}))
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, **sizes, **grids}))
    return folder


def test_windows_without_an_aspect_are_those_of_a_square() -> None:
    """16 x 16 tokens of 2 x 2 patches: 16 windows of 64 patches.

    Without the aspect the mean loss at the edges is subtracted: (64 - 4) / 6 of a side's 256 pairs.
    """
    shape = ModelShape(
        "tiny", "test", 8, 8, 8, 1, {}, tower=Tower(8, 4, full_layers=1, window_layers=1, window_rows=64)
    )
    assert encoder_work(shape, 256, 1.0).pairs == 1024**2 + 16 * 64**2
    assert encoder_work(shape, 256).pairs == 1024**2 + (256 - 10) ** 2
