"""Pixels of an image that will be seen in parts: resized, and read by `fovea.relevance` as far as no question is needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

from fovea.core.errors import EngineError
from fovea.core.image import Image
from fovea.engine.vision.processor.anyres import unpadded
from fovea.engine.vision.processor.base import (
    Arrays,
    ImageProcessor,
    ProcessedImage,
    VisualPlan,
    expect_planned,
)
from fovea.engine.vision.processor.llava_next import LlavaNextProcessor
from fovea.engine.vision.processor.pixels import resized_bytes
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.relevance.attending import entropy_total
from fovea.relevance.balancing import Ways
from fovea.relevance.pipeline import Survey, survey
from fovea.relevance.policy import content_mask
from fovea.relevance.texture import Texture
from fovea.relevance.tiles import Tiling


def takes_parts(processor: ImageProcessor) -> bool:
    """Whether images of that kind can be seen in parts."""
    return isinstance(processor, QwenProcessor | LlavaNextProcessor)


def fewest_tokens(processor: ImageProcessor) -> int:
    """Of an image that is seen in parts: a tiler's view of the whole is always there, and something beside it."""
    return (
        processor.tower.rows(processor.tower.side**2) + 1 if isinstance(processor, LlavaNextProcessor) else 1
    )


def process_parts(processor: ImageProcessor, image: Image, plan: VisualPlan) -> ProcessedImage:
    """CPU-bound: for a worker thread."""
    expect_planned(image, plan)
    if isinstance(processor, LlavaNextProcessor):
        return _process_tiles(processor, image, plan)
    if not isinstance(processor, QwenProcessor):
        raise EngineError(f"{type(processor).__name__} has no parts")
    ((height, width),) = plan.resized
    pixels = np.ascontiguousarray(resized_bytes(image, height, width, processor.resample))
    arrays = {"rgb": pixels, **_survey(pixels, processor.factor)}
    return ProcessedImage(image.identity, plan, arrays)


def plain_image(processor: ImageProcessor, image: ProcessedImage) -> ProcessedImage:
    """The same image with all of its tokens, as the encoder takes it."""
    reduction = image.plan.reduction
    assert reduction is not None
    plan = replace(image.plan, tokens=reduction.full, reduction=None)
    if "rgb" not in image.arrays:
        return replace(image, plan=plan)
    assert isinstance(processor, QwenProcessor)
    return replace(image, plan=plan, arrays={"pixel_values": processor.patches(image.arrays["rgb"])})


def own_tokens(processor: ImageProcessor, image: Image, plan: VisualPlan) -> int:
    """How many tokens an image asks for by itself, where nobody says: `attending.entropy_total` of a look at half its sides.

    Of models whose images are tiles, half of what there are. CPU-bound, some milliseconds.
    """
    if not isinstance(processor, QwenProcessor):
        return max(fewest_tokens(processor), plan.tokens // 2)
    found = glimpse(processor, image, plan)
    worth = np.maximum(found.propositional, found.perspectival)
    held = content_mask(Ways(found.propositional, found.perspectival, worth))
    return entropy_total(worth[held])


def glimpse(processor: QwenProcessor, image: Image, plan: VisualPlan) -> Survey:
    """What there is to see at half the sides of the plan. CPU-bound, some milliseconds."""
    ((height, width),) = plan.resized
    pixels = resized_bytes(image, height // 2, width // 2, Resampling.BOX)
    return survey(np.ascontiguousarray(pixels), processor.factor // 2)


def surveyed(image: ProcessedImage, cell: int) -> Survey:
    """What `process_parts` found."""
    arrays = image.arrays
    seen = Texture(arrays["channels"], arrays["luma"], cell)
    return Survey(seen, arrays["propositional"], arrays["perspectival"])


def tiling(plan: VisualPlan, side: int, full: int) -> Tiling:
    """side: cells of a tile. full: tokens of the whole plan."""
    down, across = side * plan.grid[1], side * plan.grid[2]
    rows, columns = unpadded(plan.height, plan.width, down, across)
    base = full - rows * (columns + 1)
    return Tiling(rows, columns, side, (down - rows) // 2, (across - columns) // 2, base)


def _process_tiles(processor: LlavaNextProcessor, image: Image, plan: VisualPlan) -> ProcessedImage:
    assert plan.reduction is not None
    tiles = tiling(plan, processor.tower.side, plan.reduction.full)
    cell = processor.anyres.edge // tiles.side
    size = tiles.rows * cell, tiles.columns * cell
    pixels = np.ascontiguousarray(resized_bytes(image, *size, processor.anyres.fit.resample))
    plain = processor.process(image, plan).arrays
    return ProcessedImage(image.identity, plan, {**plain, **_survey(pixels, cell)})


def _survey(pixels: NDArray[np.uint8], cell: int) -> Arrays:
    found = survey(pixels, cell)
    return {
        "channels": found.texture.channels,
        "luma": found.texture.luma,
        "propositional": found.propositional,
        "perspectival": found.perspectival,
    }
