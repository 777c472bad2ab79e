"""Pixels of an image that will be seen in parts: resized, and read by `fovea.relevance` as far as no question is needed."""

from __future__ import annotations

import numpy as np

from fovea.core.image import Image
from fovea.engine.vision.processor.base import Arrays, ProcessedImage, VisualPlan, expect_planned
from fovea.engine.vision.processor.pixels import resized_bytes
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.relevance.pipeline import Survey, survey
from fovea.relevance.texture import Texture


def process_parts(processor: QwenProcessor, image: Image, plan: VisualPlan) -> ProcessedImage:
    """CPU-bound: for a worker thread."""
    expect_planned(image, plan)
    ((height, width),) = plan.resized
    pixels = np.ascontiguousarray(resized_bytes(image, height, width, processor.resample))
    found = survey(pixels, processor.factor)
    arrays: Arrays = {
        "rgb": pixels,
        "channels": found.seen.channels,
        "luma": found.seen.luma,
        "propositional": found.propositional,
        "perspectival": found.perspectival,
    }
    return ProcessedImage(image.identity, plan, arrays)


def surveyed(image: ProcessedImage, cell: int) -> Survey:
    """What `process_parts` found."""
    arrays = image.arrays
    seen = Texture(arrays["channels"], arrays["luma"], cell)
    return Survey(seen, arrays["propositional"], arrays["perspectival"])
