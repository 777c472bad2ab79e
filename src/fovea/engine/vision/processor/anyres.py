"""Any-resolution tiling: the picture once as a whole, and once enlarged and cut into tiles of the tower's size.

Which of the model's canvases a picture gets, how it lies on that canvas, and how many rows of features are left when
the border is cut off again. Source: LLaVA-NeXT (llava-vl.github.io, 2024-01-30). Floating-point expressions keep
the order of the reference implementation: the model repeats them, and both must land on the same integer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from fovea.core.errors import CheckpointError, InvalidRequest
from fovea.core.image import Image, PixelBudget
from fovea.engine.vision.processor.budget import Bounds, expect_dimensions, middle, read
from fovea.engine.vision.processor.fit import Fit
from fovea.engine.vision.processor.palette import Palette
from fovea.engine.vision.processor.pixels import centered, cut_tiles, picture, resize, to_bytes
from fovea.engine.vision.processor.settings import Settings
from fovea.engine.vision.processor.size import Size

Canvas = tuple[int, int]  # (height, width), both multiples of the tile


def best_canvas(height: int, width: int, canvases: Sequence[Canvas]) -> Canvas:
    """The canvas that keeps most of the picture's pixels; among equals the one with least border; then the first."""

    def merit(canvas: Canvas) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - canvas[0] * canvas[1]

    return max(canvases, key=merit)


def fitted(height: int, width: int, canvas: Canvas) -> tuple[int, int]:
    """(height, width) of the picture enlarged or shrunk, at equal aspect, to touch two edges of the canvas."""
    scale_h, scale_w = canvas[0] / height, canvas[1] / width
    if scale_w < scale_h:
        return min(math.ceil(height * scale_w), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * scale_h), canvas[1])


def unpadded(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of features left of a canvas's when those of the border are cut off.

    height, width: of the source picture. An odd border keeps its last line.
    """
    if width / height > columns / rows:
        inner = int(round(height * (columns / width), 7))
        return rows - (rows - inner) // 2 * 2, columns
    inner = int(round(width * (rows / height), 7))
    return rows, columns - (columns - inner) // 2 * 2


def allowed(canvases: Sequence[Canvas], bounds: Bounds) -> Sequence[Canvas]:
    """The canvases that a budget leaves, in the model's order; below the smallest, the smallest remain."""
    areas = [height * width for height, width in canvases]
    smallest, largest = min(areas), max(areas)
    least = bounds.minimum or 1
    most = {"low": smallest, "medium": middle(smallest, largest), "high": largest}[bounds.level]
    if bounds.maximum is not None:
        most = max(bounds.maximum, smallest)
    left = [canvas for canvas, area in zip(canvases, areas, strict=True) if least <= area <= most]
    if not left:
        sizes = ", ".join(str(area) for area in sorted(set(areas)))
        raise InvalidRequest(
            f"min_pixels is {bounds.minimum}; this model tiles an image at one of {sizes} pixels, none of them within"
            " the budget",
            param="min_pixels",
        )
    return left


@dataclass(frozen=True, slots=True)
class Layout:
    """inner: (height, width) of the picture on its canvas, in pixels. rows, columns: tiles of the canvas."""

    inner: tuple[int, int]
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Anyres:
    """base: (height, width) of the whole view before `fit`. tile: edge of a tile before `fit`. edge: after it."""

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
        """size, crop, canvases: defaults of the processor class. The crop size names the tile even if nothing crops."""
        fit = Fit.read(settings, size, crop)
        wanted = settings.size("size", size, square=settings.flag("default_to_square", False)) or size
        cut = settings.size("crop_size", crop)
        settings.flag(
            "do_pad", True
        )  # evens out the tile counts of a batch; here every image is its own batch
        base = wanted.fixed or (wanted.shortest_edge or 0, wanted.shortest_edge or 0)
        tile = cut.height if cut and cut.height else base[0]
        found = _read_canvases(settings, canvases, tile)
        output = fit.output(tile, tile)
        if output != fit.output(*base) or output[0] != output[1]:
            raise settings.wrong(
                "size", (wanted, cut), "sizes that make the base view and the tiles equal squares"
            )
        return cls(Palette.read(settings), fit, found, base, tile, output[0])

    def lay(self, width: int, height: int, budget: PixelBudget) -> Layout:
        """Raises InvalidRequest if the budget leaves no canvas."""
        canvases = allowed(self.canvases, read(budget))
        expect_dimensions(width, height)
        canvas = best_canvas(height, width, canvases)
        return Layout(fitted(height, width, canvas), canvas[0] // self.tile, canvas[1] // self.tile)

    def tiles(self, image: Image, layout: Layout) -> NDArray[np.float32]:
        """(1 + rows * columns, 3, edge, edge): the whole view, then the tiles row by row."""
        source = picture(image)
        whole = self.fit.apply(resize(source, *self.base, self.fit.resample))
        enlarged = to_bytes(resize(source, *layout.inner, self.fit.resample))
        canvas = centered(enlarged, layout.rows * self.tile, layout.columns * self.tile)
        parts = cut_tiles(canvas, self.tile)
        if self._refits:
            parts = [self.fit.apply(PIL.Image.fromarray(part)) for part in parts]
        return self.palette.tiles([whole, *parts])

    def alone(self, image: Image) -> NDArray[np.float32]:
        """(1, 3, edge, edge): the whole view without tiles, its aspect kept by a border of the average color."""
        return self.palette.tiles([self.fit.apply(picture(image), border=self.palette.average)])

    @property
    def _refits(self) -> bool:
        """Whether a tile is changed by the resize and crop that each goes through; usually it has its size already."""
        own = (self.tile, self.tile)
        return self.fit.resized(*own) != own or self.fit.output(*own) != own

    def key(self, kind: str, layout: Layout) -> str:
        return (
            f"{kind};{layout.rows}x{layout.columns} tiles of {self.tile};{layout.inner[0]}x{layout.inner[1]};"
            f"base={self.base};{self.fit.key};{self.palette.key}"
        )


def _read_canvases(settings: Settings, default: Sequence[Sequence[int]], tile: int) -> tuple[Canvas, ...]:
    value = settings.raw("image_grid_pinpoints")
    found: list[Canvas] = []
    for point in default if value is None else value:
        if not isinstance(point, list | tuple) or len(point) != 2:
            raise settings.wrong("image_grid_pinpoints", value, "pairs of (height, width)")
        height, width = (settings.positive("image_grid_pinpoints", edge) for edge in point)
        if height % tile or width % tile:
            raise settings.wrong("image_grid_pinpoints", value, f"multiples of the tile, which is {tile}")
        found.append((height, width))
    if not found:
        raise settings.wrong("image_grid_pinpoints", value, "at least one pair of (height, width)")
    return tuple(found)


def expect_same_canvases(ours: Sequence[Canvas], theirs: object) -> None:
    """The model cuts its features up by its own list; None: its config does not say."""
    if theirs is None:
        return
    if not isinstance(theirs, list | tuple) or [tuple(point) for point in theirs] != list(ours):
        raise CheckpointError(
            "image_grid_pinpoints differ between the processor's files and the model's config",
            param="image_grid_pinpoints",
        )
