"""The image processor of GLM-4.1V and GLM-4.6V-Flash.

It is Qwen's, with another rule for small pictures, and with limits for all frames together.

Source: GLM-4.1V-Thinking (arXiv:2507.01006), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fovea.engine.vision.processor.qwen import ProcessorClass, QwenProcessor, build_class
from fovea.engine.vision.processor.settings import Size
from fovea.engine.vision.processor.sizes import expect_dimensions, smart_resize

MARKER = "<|image|>"


def scaling_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) as `smart_resize` computes it for a picture whose edges are at least `factor`.

    A smaller picture is first scaled until both of its edges are, with fractions cut off. The order of the
    floating-point operations must not change: the reference is GLM's own implementation.

    Raises InvalidImage for an image without pixels or more elongated than 200:1.
    """
    expect_dimensions(width, height, aspect=True)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    return smart_resize(height, width, factor, min_pixels, max_pixels)


GLM4V = ProcessorClass(
    types=("Glm4vImageProcessor", "Glm46VImageProcessor"),
    size=Size(shortest_edge=112 * 112, longest_edge=28 * 28 * 15000),
    marker=MARKER,
    rule=scaling_resize,
    volume=True,
)


def build(
    preprocessor: Mapping[str, Any], model: Mapping[str, Any], processor: Mapping[str, Any]
) -> QwenProcessor:
    return build_class(GLM4V, preprocessor, model, processor)
