"""Any-resolution tiling: a picture becomes a view of the whole, and tiles of the tower's size.

The tiles are cut from the enlarged picture on one of the model's canvases. This file chooses the canvas,
places the picture on it, and counts the features that remain without the border. Source: LLaVA-NeXT
(llava-vl.github.io, 2024-01-30). Floating-point expressions keep the order of the reference implementation,
because the model repeats them and must get the same integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fovea.core.errors import CheckpointError
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.pixels import (
    Fit,
    Palette,
    Values,
    center_on_canvas,
    cut_tiles,
    picture,
    resize,
)
from fovea.engine.vision.processor.settings import Settings, Size
from fovea.engine.vision.processor.sizes import Bounds, expect_dimensions, geometric_mean, read_bounds

Canvas = tuple[int, int]
"""(height, width) in pixels, both multiples of the tile."""


def best_canvas(height: int, width: int, canvases: Sequence[Canvas]) -> Canvas:
    """The canvas that keeps most of the picture's pixels.

    Among equal ones it is the one with the smallest border, and then the first one.
    """

    def merit(canvas: Canvas) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - canvas[0] * canvas[1]

    return max(canvases, key=merit)


def fit_to_canvas(height: int, width: int, canvas: Canvas) -> tuple[int, int]:
    """(height, width) of the picture, resized at equal aspect until it touches two edges of the canvas."""
    scale_h, scale_w = canvas[0] / height, canvas[1] / width
    if scale_w < scale_h:
        return min(math.ceil(height * scale_w), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * scale_h), canvas[1])


def size_without_border(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of a canvas's features without those of the border.

    If the border is an odd number of lines, one line of it stays.

    height, width: of the source picture.
    rows, columns: features of the canvas.
    """
    if width / height > columns / rows:
        inner = int(round(height * (columns / width), 7))
        return rows - (rows - inner) // 2 * 2, columns
    inner = int(round(width * (rows / height), 7))
    return rows, columns - (columns - inner) // 2 * 2


def allowed_canvases(canvases: Sequence[Canvas], bounds: Bounds) -> Sequence[Canvas]:
    """The canvases within a budget, in the model's order. The smallest ones are always below the upper bound.

    Raises InvalidRequest if no canvas reaches the lower bound.
    """
    areas = [height * width for height, width in canvases]
    smallest, largest = min(areas), max(areas)
    least = bounds.minimum or 1
    most = {"low": smallest, "medium": geometric_mean(smallest, largest), "high": largest}[bounds.level]
    if bounds.maximum is not None:
        most = max(bounds.maximum, smallest)
    result = [canvas for canvas, area in zip(canvases, areas, strict=True) if least <= area <= most]
    if not result:
        sizes = ", ".join(str(area) for area in sorted(set(areas)))
        raise bounds.refuse_minimum(
            f"this model tiles an image at one of {sizes} pixels, and none of these is within the budget"
        )
    return result


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of a picture on its canvas.

    inner: (height, width) of the resized picture, in pixels.
    rows, columns: tiles of the canvas.
    """

    inner: tuple[int, int]
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Anyres:
    """The any-resolution tiling of a checkpoint.

    palette: normalisation of the pixels.
    fit: resize and crop of every view and tile.
    canvases: the canvases that the model was trained with.
    base: (height, width) of the view of the whole picture before `fit`, in pixels.
    tile: edge of a tile before `fit`, in pixels.
    edge: edge of views and tiles after `fit`, in pixels.
    """

    palette: Palette
    fit: Fit
    canvases: tuple[Canvas, ...]
    base: tuple[int, int]
    tile: int
    edge: int

    @classmethod
    def read(
        cls, settings: Settings, size: Size, crop: Size | None, canvases: Sequence[Sequence[int]]
    ) -> Anyres:
        """Read the tiling from a checkpoint's settings. Raises CheckpointError.

        The crop size is the size of a tile even if nothing is cropped.

        size, crop, canvases: defaults of the processor class.
        """
        fit = Fit.read(settings, size, crop)
        wanted = settings.size("size", size, square=settings.flag("default_to_square", False)) or size
        cut = settings.size("crop_size", crop)
        # `do_pad` makes the tile counts of a batch equal. Here every image is its own batch.
        settings.flag("do_pad", True)
        base = wanted.fixed_size or (wanted.shortest_edge or 0, wanted.shortest_edge or 0)
        tile = cut.height if cut and cut.height else base[0]
        pinpoints = _read_canvases(settings, canvases, tile)
        output = fit.output_size(tile, tile)
        if output != fit.output_size(*base) or output[0] != output[1]:
            raise settings.error(
                "size", (wanted, cut), "sizes that make the base view and the tiles equal squares"
            )
        return cls(Palette.read(settings), fit, pinpoints, base, tile, output[0])

    def lay_out(self, width: int, height: int, budget: PixelBudget) -> Layout:
        """Choose a canvas and the picture's place on it.

        Raises InvalidRequest if no canvas is within the budget.
        """
        canvases = allowed_canvases(self.canvases, read_bounds(budget))
        expect_dimensions(width, height)
        canvas = best_canvas(height, width, canvases)
        return Layout(fit_to_canvas(height, width, canvas), canvas[0] // self.tile, canvas[1] // self.tile)

    def tiles(self, image: Image, layout: Layout) -> Values:
        """The view of the whole picture, then the tiles row by row: (1 + rows * columns, 3, edge, edge)."""
        source = picture(image)
        whole = self.fit.apply(resize(source, *self.base, self.fit.resample))
        enlarged = resize(source, *layout.inner, self.fit.resample)
        canvas = center_on_canvas(enlarged, layout.rows * self.tile, layout.columns * self.tile)
        parts = cut_tiles(canvas, self.tile)
        if self._refits:
            parts = [self.fit.apply(part) for part in parts]
        return self.palette.tiles([whole, *parts])

    def whole_view(self, image: Image) -> Values:
        """The view of the whole picture, without tiles: (1, 3, edge, edge).

        A border of the average color keeps its aspect.
        """
        return self.palette.tiles([self.fit.apply(picture(image), border=self.palette.average)])

    @property
    def _refits(self) -> bool:
        """Whether `fit` changes a tile. Usually a tile already has the size after `fit`."""
        own = (self.tile, self.tile)
        return self.fit.resized_size(*own) != own or self.fit.output_size(*own) != own

    def key(self, kind: str, layout: Layout) -> str:
        """The plan's key: kind of processor, layout and settings."""
        return (
            f"{kind};{layout.rows}x{layout.columns} tiles of {self.tile};{layout.inner[0]}x{layout.inner[1]};"
            f"base={self.base};{self.fit.key};{self.palette.key}"
        )


def _read_canvases(settings: Settings, default: Sequence[Sequence[int]], tile: int) -> tuple[Canvas, ...]:
    value = settings.raw("image_grid_pinpoints")
    canvases: list[Canvas] = []
    for point in default if value is None else value:
        if not isinstance(point, list | tuple) or len(point) != 2:
            raise settings.error("image_grid_pinpoints", value, "pairs of (height, width)")
        height, width = (settings.positive("image_grid_pinpoints", edge) for edge in point)
        if height % tile or width % tile:
            raise settings.error("image_grid_pinpoints", value, f"multiples of the tile, which is {tile}")
        canvases.append((height, width))
    if not canvases:
        raise settings.error("image_grid_pinpoints", value, "at least one pair of (height, width)")
    return tuple(canvases)


def expect_same_canvases(ours: Sequence[Canvas], theirs: object) -> None:
    """Raise CheckpointError if the model's config has other canvases than the processor's files.

    The model cuts up its features by its own list.

    theirs: the model's list; None: its config has none.
    """
    if theirs is None:
        return
    if not isinstance(theirs, list | tuple) or [tuple(point) for point in theirs] != list(ours):
        raise CheckpointError(
            "image_grid_pinpoints differ between the processor's files and the model's config",
            param="image_grid_pinpoints",
        )
