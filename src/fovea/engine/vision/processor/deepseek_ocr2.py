"""The image processor of DeepSeek-OCR 2: a view of the whole picture, and tiles of larger pictures.

The view keeps the picture's shape and has a border that makes it square. A picture with an edge longer than a
tile is also stretched over the grid of tiles whose aspect is nearest to its own. The visual tokens of the
tiles come first, then those of the view, then one token that ends the picture.
Source: "DeepSeek-OCR 2: Visual Causal Flow" (arXiv 2601.20552).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from PIL.Image import Resampling

from fovea.core.errors import InvalidRequest
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.base import Capabilities, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.internvl import MOST_TILES, Grid, grids_of, nearest_grid
from fovea.engine.vision.processor.pixels import (
    HALF,
    Color,
    Palette,
    center_on_canvas,
    cut_tiles,
    picture,
    read_filter,
    resize,
)
from fovea.engine.vision.processor.settings import Config, Settings, Size, expect_equal, section
from fovea.engine.vision.processor.sizes import Bounds, expect_dimensions, read_bounds

MARKER = "<image>"
"""Text of one visual token."""
VIEW_SIDE, TILE_SIDE = 16, 12
"""Visual tokens along a side of the view of the whole picture, and of a tile.

The model has this many learned queries for pictures of the two sizes, and for no other size.
"""
SHRINK = 4
"""Patches along the side of the square that becomes one visual token."""
GRAY = (127.0, 127.0, 127.0)
_NO_TILES: Grid = (0, 0)


@dataclass(frozen=True, slots=True)
class DeepseekOcr2Processor:
    """Plans and prepares images for DeepSeek-OCR 2.

    Budgets: "low" is the view of the whole picture at the size of a tile, "medium" the view at its own size.
        `max_pixels` and `min_pixels` bound the area of all tiles together; the view beside them does not
        count. A picture without tiles has the area of its view bounded: that of a tile, or the view's own.

    palette: normalisation of the pixels.
    resample: the filter of all resizes.
    border: color of the border of a view.
    edge: edge of the view of the whole picture, in pixels.
    tile: edge of a tile, in pixels.
    least, most: the model's own limits of the number of tiles.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    palette: Palette
    resample: Resampling
    border: Color
    edge: int
    tile: int
    least: int
    most: int

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        bounds = read_bounds(budget)
        expect_dimensions(width, height, aspect=True)
        edge, (rows, columns) = self._fit_budget(height, width, bounds)
        view = _fit_inside(height, width, edge)
        canvas = ((rows * self.tile, columns * self.tile),) if rows else ()
        side = VIEW_SIDE if edge == self.edge else TILE_SIDE
        tokens = rows * columns * TILE_SIDE**2 + side**2 + 1
        key = (
            f"deepseek_ocr2;{view} in {edge};{rows}x{columns} tiles of {self.tile};border={self.border};"
            f"{self.resample.name};{self.palette.key}"
        )
        grid = (1, rows, columns)
        return VisualPlan(width, height, tokens, grid, MARKER * tokens, key, (view, *canvas))

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        plan.check(image)
        view, *canvas = (resize(picture(image), *size, self.resample) for size in plan.sizes)
        edge = max(plan.sizes[0])
        arrays = {"pixel_values": self.palette.tiles([center_on_canvas(view, edge, edge, self.border)])}
        if canvas:
            arrays["tiles"] = self.palette.tiles(cut_tiles(canvas[0], self.tile))
        return ProcessedImage(image.identity, plan, arrays)

    def _fit_budget(self, height: int, width: int, bounds: Bounds) -> tuple[int, Grid]:
        """Choose the edge of the view, and the grid of tiles. Raises InvalidRequest."""
        if bounds.level != "high":
            return (self.tile if bounds.level == "low" else self.edge), _NO_TILES
        area, low, high = self.tile**2, bounds.minimum or 0, bounds.maximum
        most = self.most if high is None else min(self.most, high // area)
        least = max(self.least, -(-low // area))
        if least <= most and (max(height, width) > self.tile or low > self.edge**2):
            return self.edge, nearest_grid(height, width, self.tile, grids_of(least, most))
        views = [edge for edge in (self.edge, self.tile) if high is None or edge**2 <= high]
        if not views:
            raise InvalidRequest(
                f"max_pixels is {high}; this model accepts {area} (a view of {self.tile}x{self.tile} "
                "pixels) or more",
                param="max_pixels",
            )
        if views[0] ** 2 < low:
            largest = most * area if self.least <= most else views[0] ** 2
            raise InvalidRequest(
                f"min_pixels is {low}; within the budget this model encodes an image at {largest} pixels "
                "at most",
                param="min_pixels",
            )
        return views[0], _NO_TILES


def _fit_inside(height: int, width: int, edge: int) -> tuple[int, int]:
    """(height, width) of a picture of the same shape whose longer edge is `edge`.

    The floating-point expressions must not change: the reference computes the same ones.
    """
    scale = edge / max(height, width)
    return round(height * scale), round(width * scale)


def build(preprocessor: Config, model: Config, processor: Config) -> DeepseekOcr2Processor:
    settings = Settings(preprocessor)
    settings.processor_type(("DeepseekOcr2ImageProcessor",), "DeepseekOcr2ImageProcessor")
    vision = section(model, "vision_config")
    patch = settings.positive(
        "vision_config.sam_config.patch_size", section(vision, "sam_config").get("patch_size") or 16
    )
    for name, value in (("patch_size", patch), ("downsample_ratio", SHRINK)):
        if processor.get(name) is not None:
            expect_equal(name, processor[name], value)
    unit = patch * SHRINK
    size = settings.size("size", Size(height=1024, width=1024))
    edge, tile = unit * VIEW_SIDE, unit * TILE_SIDE
    if size is None or size.fixed_size != (edge, edge):
        raise settings.error("size", size, f"height and width of {edge}, for patches of {patch} pixels")
    if (value := settings.count("tile_size", 768)) != tile:
        raise settings.error("tile_size", value, f"{tile}, for patches of {patch} pixels")
    # Whatever the file says, the processor class of this model has large pictures cut into tiles.
    settings.flag("crop_to_patches", True)
    if not settings.flag("do_resize", True):
        raise settings.error("do_resize", False, "true")
    least, most = settings.count("min_patches", 2), settings.count("max_patches", 6)
    if not least <= most <= MOST_TILES:
        accepted = f"integers from min_patches (which is {least}) to {MOST_TILES}"
        raise settings.error("max_patches", most, accepted)
    result = DeepseekOcr2Processor(
        palette=Palette.read(settings, HALF, HALF),
        resample=read_filter(settings, Resampling.BICUBIC),
        border=_read_color(settings),
        edge=edge,
        tile=tile,
        least=least,
        most=most,
    )
    settings.close()
    return result


def _read_color(settings: Settings) -> Color:
    """The setting `background_color`. Raises CheckpointError."""
    red, green, blue = settings.channels("background_color", GRAY)
    if any(value not in range(256) for value in (red, green, blue)):
        raise settings.error("background_color", (red, green, blue), "integers from 0 to 255")
    return int(red), int(green), int(blue)
