"""Images of any size, and what both sides of a comparison with Hugging Face's processors share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import pytest

from fovea.core.image import Image, PixelBudget, content_identity
from fovea.engine.vision.processor import ImageProcessor, ProcessedImage

MakeImage = Callable[[int, int], Image]
Reference = Callable[[Any, Image], Any]
Run = Callable[..., ProcessedImage]


@pytest.fixture(scope="session")
def make_image() -> MakeImage:
    """(width, height) to an image of gradients, hard edges and noise, equal for equal dimensions."""

    def make(width: int, height: int) -> Image:
        rng = np.random.default_rng(width * 100_003 + height)
        x, y = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]
        planes = np.stack([x + 0 * y, 0 * x + y, (x + y) / 2], axis=-1)
        planes += rng.normal(0, 20, (height, width, 1))
        planes[height // 3 : height // 2, width // 3 : width // 2] = (255, 0, 128)
        rgb = planes.clip(0, 255).astype(np.uint8).tobytes()
        return Image(content_identity("test", width, height, rgb), width, height, rgb)

    return make


@pytest.fixture(scope="session")
def reference() -> Reference:
    """What a Hugging Face PIL processor makes of the image, as numpy arrays in a batch of one."""

    def run(processor: Any, image: Image, **options: Any) -> Any:
        picture = PIL.Image.frombytes("RGB", (image.width, image.height), image.rgb)
        return processor(images=picture, return_tensors="np", **options)

    return run


@pytest.fixture(scope="session")
def run() -> Run:
    """Plan and process in one; the arrays keep what the plan promised about identity."""

    def plan_and_process(
        processor: ImageProcessor, image: Image, budget: PixelBudget | None = None
    ) -> ProcessedImage:
        plan = processor.plan(image.width, image.height, budget or PixelBudget())
        made = processor.process(image, plan)
        assert made.identity == image.identity
        assert made.plan is plan
        assert made.arrays["pixel_values"].dtype == np.float32
        assert made.arrays["pixel_values"].flags.c_contiguous
        return made

    return plan_and_process
