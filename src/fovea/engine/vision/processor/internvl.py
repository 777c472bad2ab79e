"""The image processor of InternVL: the picture cut into tiles, and a view of the whole picture.

The picture is stretched over the grid of tiles whose aspect is nearest to its own. Every tile, and the view
of the whole picture after them, becomes the same number of tokens. Source: "How Far Are We to GPT-4V?"
(arXiv:2404.16821), section 3.3.

`build` reads the settings of checkpoints for transformers, `build_chat` those of the original layout
(`internvl_chat`). The original code reads the tiling from config.json. It does not read
preprocessor_config.json, which describes a CLIP processor for single tiles; that file is only checked here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from PIL.Image import Resampling

from fovea.core.errors import CheckpointError
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.base import Arrays, Capabilities, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    Palette,
    cut_tiles,
    picture,
    read_filter,
    resize,
)
from fovea.engine.vision.processor.settings import Config, Settings, Size, expect_equal, section
from fovea.engine.vision.processor.sizes import expect_dimensions, read_bounds, tile_limits

MOST_TILES = 1024
"""Most tiles that a checkpoint may allow for one picture."""
MARKER = "<IMG_CONTEXT>"
"""Text of one visual token."""
_BEGIN, _END = "<img>", "</img>"
"""Texts before and after the visual tokens of one picture."""

Grid = tuple[int, int]
"""(rows, columns) of tiles."""


@lru_cache(maxsize=64)
def grids_of(least: int, most: int) -> tuple[Grid, ...]:
    """All grids with `least` to `most` tiles; grids of fewer tiles, and then of fewer columns, come first."""
    grids = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if rows * columns >= least
    ]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


def nearest_grid(height: int, width: int, tile: int, grids: tuple[Grid, ...]) -> Grid:
    """The grid whose aspect differs least from the picture's.

    Of grids that differ equally, a later one is taken if the picture has more than half of its pixels. The
    floating-point expressions must not change: the reference computes the same ones.

    height, width: of the picture, in pixels.
    tile: edge of a tile, in pixels.
    """
    aspect, area = width / height, width * height
    nearest, least = grids[0], math.inf
    for rows, columns in grids:
        difference = abs(aspect - columns / rows)
        is_filled = area > 0.5 * tile * tile * columns * rows
        if difference < least or (difference == least and is_filled):
            nearest, least = (rows, columns), difference
    return nearest


@dataclass(frozen=True, slots=True)
class InternVLProcessor:
    """Plans and prepares images for InternVL.

    Budgets: "low" is one tile, the whole picture. "medium" allows as many tiles as the geometric mean of 1
        and the model's most. `max_pixels` and `min_pixels` bound the area of all tiles together. The view
        of the whole picture is added to two tiles or more; it does not count.

    palette: normalisation of the pixels.
    resample: the filter of all resizes.
    tile: edge of a tile, in pixels.
    least, most: the model's own limits of the number of tiles.
    whole: whether a view of the whole picture follows two tiles or more.
    tile_tokens: visual tokens per tile.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    palette: Palette
    resample: Resampling
    tile: int
    least: int
    most: int
    whole: bool
    tile_tokens: int

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        limits = tile_limits(read_bounds(budget), self.tile**2, self.least, self.most)
        expect_dimensions(width, height)
        rows, columns = nearest_grid(height, width, self.tile, grids_of(*limits))
        size = (rows * self.tile, columns * self.tile)
        is_cut = rows * columns > 1
        grid = (int(self.whole), rows, columns) if is_cut else (1, 0, 0)
        tokens = (rows * columns + int(is_cut and self.whole)) * self.tile_tokens
        key = (
            f"internvl;{rows}x{columns} tiles of {self.tile};views={grid[0]};{self.resample.name};"
            f"{self.palette.key}"
        )
        text = f"{_BEGIN}{MARKER * tokens}{_END}"
        return VisualPlan(width, height, tokens, grid, text, key, (size,), around=(_BEGIN, _END))

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        plan.check(image)
        source = picture(image)
        tiles = cut_tiles(resize(source, *plan.sizes[0], self.resample), self.tile)
        if len(tiles) > 1 and plan.grid[0]:
            tiles.append(resize(source, self.tile, self.tile, self.resample))
        arrays: Arrays = {"pixel_values": self.palette.tiles(tiles)}
        return ProcessedImage(image.identity, plan, arrays)


def build(preprocessor: Config, model: Config, processor: Config) -> InternVLProcessor:
    settings = Settings(preprocessor)
    settings.processor_type(("GotOcr2ImageProcessor",), "GotOcr2ImageProcessor")
    size = settings.size("size", Size(height=384, width=384))
    if size is None or size.fixed_size is None or size.height != size.width:
        raise settings.error("size", size, "height and width, of equal value")
    # Whatever the file says, the processor class of this model has pictures cut into tiles.
    settings.flag("crop_to_patches", True)
    if not settings.flag("do_resize", True):
        raise settings.error("do_resize", False, "true")
    least, most = read_tile_limits(settings, "min_patches", "max_patches", 12)
    palette = Palette.read(settings, CLIP_MEAN, CLIP_STD)
    resample = read_filter(settings, Resampling.BICUBIC)
    settings.close()
    tokens = tokens_per_tile(size.fixed_size[0], model)
    if processor.get("image_seq_length") is not None:
        expect_equal("image_seq_length", processor["image_seq_length"], tokens)
    return InternVLProcessor(palette, resample, size.fixed_size[0], least, most, True, tokens)


def read_tile_limits(settings: Settings, least_name: str, most_name: str, default: int) -> tuple[int, int]:
    """The fewest and the most tiles of a picture. Raises CheckpointError.

    default: most tiles, if the file does not name them.
    """
    least, most = settings.count(least_name, 1), settings.count(most_name, default)
    if not least <= most <= MOST_TILES:
        raise settings.error(
            most_name, most, f"integers from {least_name} (which is {least}) to {MOST_TILES}"
        )
    return least, most


def tokens_per_tile(tile: int, model: Config) -> int:
    """Visual tokens of a tile: 1 / downsample_ratio**2 of the encoder's patches become one token.

    tile: edge of a tile in pixels, which must be the size of the encoder's input.

    Raises CheckpointError.
    """
    vision = section(model, "vision_config")
    image, patch = (
        _edge(vision, name, default) for name, default in (("image_size", 448), ("patch_size", 14))
    )
    expect_equal("size", tile, image)
    factor = merge_factor(model.get("downsample_ratio", 0.5), image // patch)
    return (image // patch // factor) ** 2


def merge_factor(ratio: object, side: int) -> int:
    """Patches along the side of a square that becomes one token. Raises CheckpointError.

    ratio: the setting downsample_ratio.
    side: patches along the side of a tile.
    """
    if isinstance(ratio, int | float) and 0 < ratio <= 1:
        factor = round(1 / ratio)
        if factor * ratio == 1 and side % factor == 0:
            return factor
    raise CheckpointError(
        f"downsample_ratio is {ratio!r}; accepted: 1 / N, with an N that divides the {side} patches along "
        "the side of a tile",
        param="downsample_ratio",
    )


def _edge(vision: Config, name: str, default: int) -> int:
    """An edge in pixels, which newer configs write twice: [height, width]. Raises CheckpointError."""
    value = vision.get(name, default)
    edges = set(value) if isinstance(value, list | tuple) else {value}
    edge = edges.pop() if len(edges) == 1 else None
    if not isinstance(edge, int) or isinstance(edge, bool) or edge < 1:
        raise CheckpointError(
            f"vision_config.{name} is {value!r}; accepted: a positive integer, such as 448, or two equal "
            "ones",
            param=name,
        )
    return edge


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def build_chat(preprocessor: Config, model: Config, processor: Config) -> InternVLProcessor:
    """Build the processor. model: config.json as `engine.models.internvl_chat` translates it."""
    tiling = Settings(model, "config.json")
    least, most = read_tile_limits(tiling, "min_dynamic_patch", "max_dynamic_patch", 6)
    if not tiling.flag("dynamic_image_size", False):
        least = most = 1
    whole = tiling.flag("use_thumbnail", False)
    settings = Settings(preprocessor)
    settings.processor_type(("CLIPImageProcessor",), "CLIPImageProcessor")
    size = settings.size("size", Size(height=448, width=448))
    crop = settings.size("crop_size", size)
    edge = _square(size)
    if not edge or _square(crop) != edge:
        raise settings.error("size", (size, crop), "one edge for size and crop_size")
    # A tile has this size already, so neither of these changes it.
    settings.flag("do_resize", True)
    settings.flag("do_center_crop", True)
    palette = Palette.read(settings, IMAGENET_MEAN, IMAGENET_STD)
    resample = read_filter(settings, Resampling.BICUBIC)
    settings.close()
    return InternVLProcessor(palette, resample, edge, least, most, whole, tokens_per_tile(edge, model))


def _square(size: Size | None) -> int:
    """The edge of a square size, which old files name shortest_edge; 0: it is not a square."""
    if size is None:
        return 0
    height, width = size.fixed_size or (size.shortest_edge, size.shortest_edge)
    return height if height and height == width else 0
