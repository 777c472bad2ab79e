"""Sizes and grids: a client's PixelBudget as bounds, sizes in whole merge windows, and the order of patches.

This is arithmetic without pixels and weights. Patches arrive in merge order: the `merge` x `merge` patches
that become one visual token are neighbours in the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fovea.core.errors import InvalidImage, InvalidRequest
from fovea.core.media import DETAILS, Level, PixelBudget

LEVEL_TOKENS: dict[Level, int] = {"low": 64, "medium": 256}
"""Approximate visual tokens of each level, where the architecture allows it.

"high" is the model's own limit.
"""
MAX_ASPECT = 200
"""Largest ratio of the longer edge to the shorter one, where a processor needs such a limit."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of an image's area.

    minimum, maximum: pixels; None: the client names no such bound.
    level: the detail level; "high" if the client names pixels.
    """

    minimum: int | None
    maximum: int | None
    level: Level = "high"

    @property
    def explicit(self) -> bool:
        """Whether the client names pixels."""
        return self.minimum is not None or self.maximum is not None

    def refuse_maximum(self, reason: str) -> InvalidRequest:
        """The error for an upper bound that cannot be met. reason: what the model does or accepts."""
        return InvalidRequest(f"max_pixels is {self.maximum}; {reason}", param="max_pixels")

    def refuse_minimum(self, reason: str) -> InvalidRequest:
        """The error for a lower bound that cannot be met. reason: what the model does or accepts."""
        return InvalidRequest(f"min_pixels is {self.minimum}; {reason}", param="min_pixels")


def read_bounds(budget: PixelBudget) -> Bounds:
    """Check a budget and return its bounds. If it names a bound in pixels, its `detail` has no effect.

    Raises InvalidRequest; `param` names the field.
    """
    if budget.detail not in DETAILS:
        raise InvalidRequest(f"detail is {budget.detail!r}; accepted: {', '.join(DETAILS)}", param="detail")
    for name, value in (("min_pixels", budget.min_pixels), ("max_pixels", budget.max_pixels)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InvalidRequest(
                f"{name} is {value!r}; accepted: a positive integer, such as 262144", param=name
            )
    low, high = budget.min_pixels, budget.max_pixels
    if low is not None and high is not None and low > high:
        raise InvalidRequest(f"min_pixels is {low}, above max_pixels, which is {high}", param="min_pixels")
    level: Level = "high" if budget.explicit or budget.detail == "auto" else budget.detail
    return Bounds(low, high, level)


def geometric_mean(smallest: int, largest: int) -> int:
    """The geometric mean, rounded down.

    It is the size of the level "medium" for models that cut images into tiles.
    """
    return math.isqrt(smallest * largest)


def expect_dimensions(width: int, height: int, *, aspect: bool = False) -> None:
    """Raise InvalidImage for an image without pixels.

    aspect: also refuse images more elongated than 200:1. Some resizes turn these into no pixels, or into
        gigabytes.
    """
    if width < 1 or height < 1:
        raise InvalidImage(f"it is {width}x{height} pixels; both must be at least 1")
    if aspect and max(width, height) > MAX_ASPECT * min(width, height):
        raise InvalidImage(
            f"it is {width}x{height} pixels; one edge may be at most {MAX_ASPECT} times as long as the other"
        )


def expect_area(area: int, bounds: Bounds) -> None:
    """Raise InvalidRequest if an image that is not resized has more or fewer pixels than asked for."""
    if not (bounds.minimum or 1) <= area <= (bounds.maximum or area):
        raise InvalidRequest(
            f"the image has {area} pixels and this model does not resize (do_resize is false)",
            param="max_pixels" if bounds.maximum and area > bounds.maximum else "min_pixels",
        )


def expect_fixed(bounds: Bounds, pixels: int, architecture: str) -> None:
    """Raise InvalidRequest for a bound that excludes the only number of pixels.

    pixels: area to which the architecture resizes every image.
    architecture: its name, for the error message.
    """
    if bounds.maximum is not None and bounds.maximum < pixels:
        raise bounds.refuse_maximum(f"{architecture} has a fixed resolution of {pixels} pixels per image")
    if bounds.minimum is not None and bounds.minimum > pixels:
        raise bounds.refuse_minimum(f"{architecture} has a fixed resolution of {pixels} pixels per image")


def tile_limits(bounds: Bounds, area: int, least: int, most: int) -> tuple[int, int]:
    """Return the fewest and the most tiles within a budget.

    area: pixels of a tile.
    least, most: the model's own limits, in tiles.

    Raises InvalidRequest.
    """
    most = {"low": 1, "medium": geometric_mean(1, most), "high": most}[bounds.level]
    if bounds.maximum is not None:
        most = min(most, bounds.maximum // area)
        if not most:
            raise bounds.refuse_maximum(f"this model accepts {area} (one tile) or more")
    if bounds.minimum is not None:
        least = max(least, -(-bounds.minimum // area))
        if least > most:
            raise bounds.refuse_minimum(
                f"within the budget this model cuts an image into at most "
                f"{most} tiles, which are {most * area} pixels"
            )
    return min(least, most), most


def expect_multiples(width: int, height: int, factor: int) -> None:
    """Raise InvalidImage if an image that is not resized does not consist of whole visual tokens."""
    if height % factor or width % factor:
        raise InvalidImage(
            f"it is {width}x{height} pixels; this model does not resize (do_resize is false), so both "
            f"edges must be multiples of {factor}"
        )


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
    rounded = round(height / factor) * factor, round(width / factor) * factor
    return within_limits(height, width, rounded, factor, min_pixels, max_pixels)


def within_limits(
    height: int,
    width: int,
    rounded: tuple[int, int],
    factor: int,
    least: int,
    most: int,
    *,
    frames: int = 1,
    counted: int = 1,
) -> tuple[int, int]:
    """Return a rounded size, or one of the same aspect whose area is within limits, in pixels.

    Shrunk edges are rounded down, at least to `factor`; enlarged edges are rounded up.

    frames: frames of a video, whose areas count together.
    counted: the number of frames that are compared with the limits.
    """
    area = counted * rounded[0] * rounded[1]
    if area > most:
        shrink = math.sqrt((frames * height * width) / most)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if area < least:
        grow = math.sqrt(least / (frames * height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rounded


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


Index = NDArray[np.int64]


def patch_coordinates(grid: tuple[int, int, int], merge: int) -> Index:
    """Row and column of every patch in merge order, (t * h * w, 2). grid: (t, h, w) in patches."""
    time, height, width = grid
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    blocked = (height // merge, merge, width // merge, merge)
    order = [axis.reshape(blocked).transpose(0, 2, 1, 3).ravel() for axis in (rows, columns)]
    return np.tile(np.stack(order, axis=1), (time, 1))


def nested_axes(merges: int) -> list[int]:
    """The order of the axes of a picture in which the patches of each merge are neighbours.

    The picture has the axes (rows, 2, ..., 2, rest, columns, 2, ..., 2, rest): both sides are cut into parts
    of 2**merges patches, these into halves, and so on. The two axes `rest` are not in the result; they come
    after the others, in any order.
    """
    return [axis for level in range(merges + 1) for axis in (level, merges + 2 + level)]


def nested_coordinates(grid: tuple[int, int], merges: int) -> Index:
    """Row and column of every patch, (rows * columns, 2), if 2 x 2 patches are merged several times.

    After each merge, the next four neighbours in the list are a square of 2 x 2.

    grid: (rows, columns) of patches, multiples of 2**merges.
    """
    cut = [part for side in grid for part in (side >> merges, *(2,) * merges, 1)]
    axes = np.meshgrid(*map(np.arange, grid), indexing="ij")
    order = (*nested_axes(merges), merges + 1, 2 * merges + 3)
    return np.stack([axis.reshape(cut).transpose(order).ravel() for axis in axes], axis=1)


def window_order(
    grid: tuple[int, int, int], merge: int, window: int
) -> tuple[Index, tuple[tuple[int, int], ...]]:
    """Order the visual tokens by window, frame by frame, with windows of equal size next to each other.

    grid: (t, h, w) in patches.
    window: side of a window in visual tokens.

    Returns the tokens' numbers in merge order, (tokens,), and the runs (windows, patches per window). Windows
    at the edges and in the corner of the grid are smaller, so a frame has up to four runs.
    """
    time, height, width = grid[0], grid[1] // merge, grid[2] // merge
    tokens = np.arange(time * height * width).reshape(time, height, width)
    order: list[Index] = []
    runs: list[tuple[int, int]] = []
    for frame in tokens:
        by_size: dict[int, list[Index]] = {}
        for top in range(0, height, window):
            for left in range(0, width, window):
                block = frame[top : top + window, left : left + window].ravel()
                by_size.setdefault(block.size, []).append(block)
        for size, blocks in by_size.items():
            order += blocks
            runs.append((len(blocks), size * merge**2))
    return np.concatenate(order), tuple(runs)
