"""The size to which a picture is resized so that whole merge windows cover it, within limits of its area.

Source: Qwen2-VL (arXiv:2409.12191), section 2.1, "naive dynamic resolution".
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fovea.engine.vision.processor.budget import expect_dimensions

SizeRule = Callable[[int, int, int, int, int], tuple[int, int]]
"""A function with the arguments and the result of `smart_resize`."""


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) of nearly the same aspect, both multiples of `factor`, with an area within the limits.

    An edge is at least `factor`, so a very elongated image may exceed a small `max_pixels`. Halves are
    rounded to the even multiple. The rounding and the order of the floating-point operations must not change:
    the reference is Qwen's own implementation.

    min_pixels, max_pixels: limits of the area, in pixels.

    Raises InvalidImage for an image without pixels or more elongated than 200:1.
    """
    expect_dimensions(width, height, aspect=True)
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return new_height, new_width


def trim(height: int, width: int, factor: int, max_pixels: int) -> tuple[int, int]:
    """Shorten the longer edge, and then the shorter one if necessary, until the area is at most `max_pixels`.

    Shortened edges are multiples of `factor`. `max_pixels` must be at least factor**2.
    """
    if height * width <= max_pixels:
        return height, width
    short = min(height, width)
    long = max(factor, max_pixels // short // factor * factor)
    short = min(short, max(factor, max_pixels // long // factor * factor))
    return (short, long) if height <= width else (long, short)
