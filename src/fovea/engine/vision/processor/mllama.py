"""The image processor of Llama 3.2 Vision (mllama): a picture on a canvas of one to four tiles.

The picture keeps its aspect. It is resized to fit the canvas and lies in its top left corner; the rest is
black. There is no view of the whole picture beside the tiles. The prompt has one token for an image:
the decoder reads the encoder's output through cross-attention. Source: "The Llama 3 Herd of Models"
(arXiv 2407.21783), section 7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from PIL.Image import Resampling

from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.base import Arrays, Capabilities, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.pixels import HALF, Palette, cut_tiles, picture, read_filter, resize
from fovea.engine.vision.processor.settings import Config, Settings, Size, expect_equal, section
from fovea.engine.vision.processor.sizes import (
    expect_dimensions,
    read_bounds,
    tile_limits,
)

MARKER = "<|image|>"
"""Text of an image in the prompt."""
MOST_TILES = 64
"""Most tiles that a checkpoint may allow for one picture."""

Grid = tuple[int, int]
"""(rows, columns) of tiles."""


@lru_cache(maxsize=16)
def grids_of(most: int) -> tuple[Grid, ...]:
    """All grids of at most `most` tiles; fewer rows, and then fewer columns, come first.

    The aspect ratio id of a grid is its place in this tuple, from 1.
    """
    return tuple((rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1))


def best_grid(height: int, width: int, tile: int, grids: tuple[Grid, ...]) -> Grid:
    """The grid that enlarges the picture least; if all are too small for it, the one that shrinks it least.

    Of equally good grids, the one with the fewest tiles is taken, and of these the first.

    height, width: of the picture, in pixels.
    tile: edge of a tile, in pixels.
    """
    scales = [min(rows * tile / height, columns * tile / width) for rows, columns in grids]
    enlarging = [scale for scale in scales if scale >= 1]
    best = min(enlarging) if enlarging else max(scales)
    equal = [grid for grid, scale in zip(grids, scales, strict=True) if scale == best]
    return min(equal, key=lambda grid: grid[0] * grid[1])


def largest_grid(height: int, width: int, least: int, grids: tuple[Grid, ...]) -> Grid:
    """The grid of at least `least` tiles on which the picture can be largest; of equal ones, the smallest.

    height, width: of the picture, in pixels.
    """
    allowed = [(rows, columns) for rows, columns in grids if rows * columns >= least]
    return max(allowed, key=lambda grid: (min(grid[0] / height, grid[1] / width), -grid[0] * grid[1]))


def size_on_canvas(
    height: int, width: int, canvas: tuple[int, int], least: tuple[int, int]
) -> tuple[int, int]:
    """(height, width) of the resized picture, which fits into the canvas.

    The floating-point expressions must not change: the reference computes the same ones.

    canvas: (height, width) in pixels.
    least: (height, width); a smaller picture is enlarged until one of its edges has this length.
    """
    tall = min(max(height, least[0]), canvas[0])
    wide = min(max(width, least[1]), canvas[1])
    if wide / width < tall / height:
        return min(math.floor(height * (wide / width)) or 1, tall), wide
    return tall, min(math.floor(width * (tall / height)) or 1, wide)


@dataclass(frozen=True, slots=True)
class MllamaProcessor:
    """Plans and prepares images for Llama 3.2 Vision.

    Budgets: "low" is a canvas of one tile. "medium" allows as many tiles as the geometric mean of 1 and the
        model's most. `max_pixels` and `min_pixels` bound the area of the canvas. A picture whose canvas would
        be smaller than `min_pixels` is enlarged until it fills the width or the height of a larger one.

    palette: normalisation of the pixels.
    resample: the filter of the resize.
    tile: edge of a tile, in pixels.
    most: the model's own limit of the number of tiles.
    tile_states: rows of encoder output per tile: its patches and a class token.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(droppable=False)

    palette: Palette
    resample: Resampling
    tile: int
    most: int
    tile_states: int

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        bounds = read_bounds(budget)
        least, most = tile_limits(bounds, self.tile**2, 1, self.most)
        expect_dimensions(width, height)
        rows, columns = best_grid(height, width, self.tile, grids_of(most))
        smallest = self.tile, self.tile
        if rows * columns < least:
            rows, columns = largest_grid(height, width, least, grids_of(most))
            smallest = rows * self.tile, columns * self.tile
        canvas = rows * self.tile, columns * self.tile
        size = size_on_canvas(height, width, canvas, smallest)
        key = (
            f"mllama;{rows}x{columns} of {self.most} tiles of {self.tile};picture={size[0]}x{size[1]};"
            f"{self.resample.name};{self.palette.key}"
        )
        return VisualPlan(
            width,
            height,
            1,
            (1, rows, columns),
            MARKER,
            key,
            (size,),
            states=rows * columns * self.tile_states,
        )

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        plan.check(image)
        _, rows, columns = plan.grid
        height, width = plan.sizes[0]
        canvas = np.zeros((rows * self.tile, columns * self.tile, 3), np.uint8)
        canvas[:height, :width] = resize(picture(image), height, width, self.resample)
        arrays: Arrays = {
            "pixel_values": self.palette.tiles(cut_tiles(canvas, self.tile)),
            "aspect_ratio_ids": np.array([1 + grids_of(self.most).index((rows, columns))], np.int64),
        }
        return ProcessedImage(image.identity, plan, arrays)


def build(preprocessor: Config, model: Config, processor: Config) -> MllamaProcessor:
    settings = Settings(preprocessor)
    settings.processor_type(("MllamaImageProcessor",), "MllamaImageProcessor")
    size = settings.size("size", Size(height=224, width=224))
    if size is None or size.fixed_size is None or size.height != size.width:
        raise settings.error("size", size, "height and width, of equal value")
    for name in ("do_resize", "do_pad"):
        if not settings.flag(name, True):
            raise settings.error(name, False, "true")
    most = settings.count("max_image_tiles", 4)
    if most > MOST_TILES:
        raise settings.error("max_image_tiles", most, f"integers from 1 to {MOST_TILES}")
    palette = Palette.read(settings, HALF, HALF)
    resample = read_filter(settings, Resampling.BILINEAR)
    settings.close()
    vision = Settings(section(model, "vision_config"), "config.json")
    tile = size.fixed_size[0]
    expect_equal("size", tile, vision.raw("image_size"))
    expect_equal("max_image_tiles", most, vision.raw("max_num_tiles"))
    grids = [list(grid) for grid in grids_of(most)]
    ratios = vision.raw("supported_aspect_ratios")
    if ratios is not None and ratios != grids:
        raise vision.error("supported_aspect_ratios", ratios, f"all grids of {most} tiles, which are {grids}")
    states = (tile // vision.count("patch_size", 14)) ** 2 + 1
    return MllamaProcessor(palette, resample, tile, most, states)
