"""Fixtures for image processors: images of any size, and runs of Hugging Face's processors and of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import pytest

from fovea.core.media import Image, PixelBudget, content_identity
from fovea.engine.vision.processor import ImageProcessor, ProcessedImage

MakeImage = Callable[[int, int], Image]
Reference = Callable[[Any, Image], Any]
Run = Callable[..., ProcessedImage]


@pytest.fixture(scope="session")
def make_image() -> MakeImage:
    """A function from (width, height) to an image of gradients, hard edges and noise.

    Equal sizes give equal images.
    """

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
    """A function that runs a Hugging Face PIL processor on an image.

    It returns numpy arrays, in a batch of one.
    """

    def run(processor: Any, image: Image, **options: Any) -> Any:
        picture = PIL.Image.frombytes("RGB", (image.width, image.height), image.rgb)
        return processor(images=picture, return_tensors="np", **options)

    return run


@pytest.fixture(scope="session")
def run() -> Run:
    """A function that plans and processes an image, and checks identity, plan and types of the result."""

    def plan_and_process(
        processor: ImageProcessor, image: Image, budget: PixelBudget | None = None
    ) -> ProcessedImage:
        plan = processor.plan(image.width, image.height, budget or PixelBudget())
        result = processor.process(image, plan)
        assert result.identity == image.identity
        assert result.plan is plan
        assert result.arrays["pixel_values"].dtype == np.float32
        assert result.arrays["pixel_values"].flags.c_contiguous
        return result

    return plan_and_process
