"""The image processor of PaddleOCR-VL: Qwen's, with another rule for small pictures, and without time.

Source: PaddleOCR-VL (arXiv:2510.14528), section 2.2, "dynamic resolution preprocessor".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fovea.engine.vision.processor.qwen import ProcessorClass, QwenProcessor, build_class
from fovea.engine.vision.processor.settings import Size
from fovea.engine.vision.processor.sizes import expect_dimensions, smart_resize

MARKER = "<|IMAGE_PLACEHOLDER|>"


def enlarging_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) as `smart_resize` computes it for a picture whose edges are at least `factor`.

    A smaller picture counts with the size at which its shorter edge is `factor`. The rounding and the order
    of the two steps must not change: the reference is PaddleOCR-VL's own implementation.

    Raises InvalidImage for an image without pixels or more elongated than 200:1.
    """
    expect_dimensions(width, height, aspect=True)
    if height < factor:
        height, width = factor, round(width * factor / height)
    if width < factor:
        height, width = round(height * factor / width), factor
    return smart_resize(height, width, factor, min_pixels, max_pixels)


PADDLEOCR_VL = ProcessorClass(
    types=("PaddleOCRVLImageProcessor",),
    size=Size(shortest_edge=384 * 384, longest_edge=1536 * 1536),
    marker=MARKER,
    rule=enlarging_resize,
    frames=1,
)
"""The configuration of the published tower has a temporal patch size of 2, which its code does not use."""


def build(
    preprocessor: Mapping[str, Any], model: Mapping[str, Any], processor: Mapping[str, Any]
) -> QwenProcessor:
    return build_class(PADDLEOCR_VL, preprocessor, model, processor)
