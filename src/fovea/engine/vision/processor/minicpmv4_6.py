"""The image processor of MiniCPM-V 4.6: a view of the whole picture, and tiles of a large one.

A picture with more pixels than one tile holds is also cut into tiles, which the settings call slices. The
grid of tiles is the one whose shape is nearest to the picture's. View and tiles have a size of their own for
every picture: about the same number of pixels, in whole visual tokens. The prompt numbers the images. Source:
"LLaVA-UHD" (arXiv:2403.11703), section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from PIL.Image import Resampling

from fovea.core.errors import CheckpointError
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.base import Capabilities, ProcessedImage, VisualPlan, begins_with_attention
from fovea.engine.vision.processor.pixels import HALF, Bytes, Palette, Values, picture, read_filter, resize
from fovea.engine.vision.processor.settings import Config, Settings, expect_equal, section
from fovea.engine.vision.processor.sizes import (
    Bounds,
    expect_dimensions,
    geometric_mean,
    nested_coordinates,
    read_bounds,
    trim,
)
from fovea.kernels.native.pictures import Order

MARKER = "<|image_pad|>"
"""Text of one visual token."""
NUMBER = "<image_id>{}</image_id>"
"""Text before an image; the braces stand for the image's number."""
MERGES: Mapping[str, int] = {"4x": 1, "16x": 2}
"""How often two patches become one along each side, by the setting `downsample_mode`."""
MOST_TILES = 1024
"""Most tiles that a checkpoint may allow for one picture."""

Pair = tuple[int, int]
"""(height, width) in pixels, or (rows, columns)."""


def whole_tokens(length: float, side: int) -> int:
    """The multiple of `side` that is nearest to a length, and at least `side`."""
    return max(round(length / side) * side, side)


def with_area(height: float, width: float, edge: int, side: int) -> Pair:
    """(height, width) of nearly the same aspect, in whole tokens, with about the area of a square.

    edge: side of that square, in pixels.
    side: side of a token, in pixels.

    The floating-point expressions must not change: the reference computes the same ones.
    """
    aspect = width / height
    tall = int(edge / math.sqrt(aspect))
    return whole_tokens(tall, side), whole_tokens(int(tall * aspect), side)


def nearest_grid(height: int, width: int, count: int, most: int) -> Pair:
    """(rows, columns) of the grid of tiles whose shape is nearest to the picture's.

    count: wanted number of tiles, at least 2. One tile more or less is accepted, too.
    most: the largest number of tiles.

    Of grids that are equally near, the one with more rows is chosen.
    """
    aspect = math.log(width / height)
    best, nearest = (1, 1), math.inf
    for tiles in (count - 1, count, count + 1):
        if tiles == 1 or tiles > most:
            continue
        for rows in range(1, tiles + 1):
            if tiles % rows:
                continue
            distance = abs(aspect - math.log(tiles // rows / rows))
            if distance < nearest or (distance == nearest and rows > best[0]):
                best, nearest = (rows, tiles // rows), distance
    return best


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of one picture's view and tiles.

    view: (height, width) of the view of the whole picture, in pixels.
    grid: (rows, columns) of tiles; (0, 0): there are none.
    canvas: (height, width) of the picture that is cut into tiles; (0, 0): there is none.
    """

    view: Pair
    grid: Pair = (0, 0)
    canvas: Pair = (0, 0)

    @property
    def area(self) -> int:
        """Pixels of all tiles; without tiles, of the view."""
        return math.prod(self.canvas) or math.prod(self.view)


@dataclass(frozen=True, slots=True)
class MiniCPMProcessor:
    """Plans and prepares images for MiniCPM-V 4.6.

    Budgets: "low" is the view of the whole picture alone. "medium" allows as many tiles as the geometric
        mean of 1 and the model's most. `max_pixels` and `min_pixels` bound the area of all tiles together;
        the view beside them does not count. A picture without tiles has its view bounded, which
        `max_pixels` can make as small as one token.

    palette: normalisation of the pixels.
    resample: the filter of all resizes.
    patch: side of an encoder patch, in pixels.
    merges: how often two patches become one along each side.
    edge: side of the square that has about as many pixels as a tile.
    most: most tiles of a picture; 1: pictures are not cut.
    numbers: whether the prompt numbers the images.
    decoder_probe: see `Capabilities`.
    """

    palette: Palette
    resample: Resampling
    patch: int
    merges: int
    edge: int
    most: int
    numbers: bool
    decoder_probe: bool

    @property
    def side(self) -> int:
        """Side in pixels of the square that becomes one visual token."""
        return self.patch << self.merges

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(droppable=False, decoder_probe=self.decoder_probe)

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        bounds = read_bounds(budget)
        expect_dimensions(width, height, aspect=True)
        layout = self._fit_budget(height, width, bounds)
        rows, columns = layout.grid
        sizes = (layout.view, layout.canvas) if rows else (layout.view,)
        tokens = sum(map(math.prod, sizes)) // self.side**2
        key = (
            f"minicpmv4_6;{layout.view};{layout.canvas} in {layout.grid};{self.patch}x{self.merges};"
            f"{self.resample.name};{self.palette.key}"
        )
        number = NUMBER if self.numbers else ""
        text = self._text(layout)
        return VisualPlan(width, height, tokens, (1, rows, columns), text, key, sizes, number=number)

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        plan.check(image)
        view, *canvas = (resize(picture(image), *size, self.resample) for size in plan.sizes)
        arrays = {"pixel_values": self._prepare([view])}
        if canvas:
            arrays["tiles"] = self._prepare(_cut(canvas[0], *plan.grid[1:]))
        return ProcessedImage(image.identity, plan, arrays)

    def _prepare(self, pictures: list[Bytes]) -> Values:
        """Turn pictures of one size into (pictures, patches, channels * patch * patch)."""
        patch, (height, width) = self.patch, pictures[0].shape[:2]
        places = nested_coordinates((height // patch, width // patch), self.merges) * patch
        rows = self.palette.patches(pictures, Order(places, patch, patch))
        return rows.reshape(len(pictures), -1, rows.shape[1])

    def _fit_budget(self, height: int, width: int, bounds: Bounds) -> Layout:
        """The layout within a budget whose number of tiles is nearest to the model's own choice.

        Smaller numbers are tried first. Raises InvalidRequest.
        """
        most = {"low": 1, "medium": geometric_mean(1, self.most), "high": self.most}[bounds.level]
        if bounds.maximum is not None and bounds.maximum < self.side**2:
            raise bounds.refuse_maximum(f"this model accepts {self.side**2} (one token) or more")
        largest = 0
        for count in self._counts(height, width, most):
            layout = self._layout(height, width, count, most, bounds.maximum)
            if bounds.maximum is not None and layout.area > bounds.maximum:
                continue
            if bounds.minimum is None or layout.area >= bounds.minimum:
                return layout
            largest = max(largest, layout.area)
        raise bounds.refuse_minimum(
            f"within the budget this model encodes this image at {largest} pixels at most"
        )

    def _counts(self, height: int, width: int, most: int) -> Iterator[int]:
        """Numbers of tiles: the model's own, smaller ones in descending order, and larger ones."""
        own = max(1, min(math.ceil(width * height / (self.edge * self.edge)), most))
        yield from range(own, 0, -1)
        yield from range(own + 1, most + 1)

    def _layout(self, height: int, width: int, count: int, most: int, maximum: int | None) -> Layout:
        """The layout for a wanted number of tiles. maximum: bound of the view, if there are no tiles."""
        if count == 1:
            view = with_area(height, width, self.edge, self.side)
            if maximum is not None and math.prod(view) > maximum:
                view = with_area(height, width, min(self.edge, math.isqrt(maximum)), self.side)
                view = trim(*view, self.side, maximum)
            return Layout(view)
        rows, columns = nearest_grid(height, width, count, most)
        tile_height, tile_width = whole_tokens(height, rows) / rows, whole_tokens(width, columns) / columns
        down, across = with_area(tile_height, tile_width, self.edge, self.side)
        if width * height > self.edge * self.edge:
            view = with_area(height, width, self.edge, self.side)
        else:  # beside tiles, the view of a small picture is not enlarged
            view = whole_tokens(height, self.side), whole_tokens(width, self.side)
        return Layout(view, (rows, columns), (down * rows, across * columns))

    def _text(self, layout: Layout) -> str:
        rows, columns = layout.grid
        text = f"<image>{self._run(layout.view)}</image>"
        if not rows:
            return text
        height, width = layout.canvas
        line = f"<slice>{self._run((height // rows, width // columns))}</slice>" * columns
        return text + "\n".join([line] * rows)

    def _run(self, size: Pair) -> str:
        return MARKER * (math.prod(size) // self.side**2)


def _cut(canvas: Bytes, rows: int, columns: int) -> list[Bytes]:
    """Cut a picture into equal tiles, row by row."""
    return [part for band in np.split(canvas, rows) for part in np.split(band, columns, axis=1)]


def build(preprocessor: Config, model: Config, processor: Config) -> MiniCPMProcessor:
    settings = Settings(preprocessor)
    settings.processor_type(("MiniCPMV4_6ImageProcessor",), "MiniCPMV4_6ImageProcessor")
    patch, mode = settings.count("patch_size", 14), settings.raw("downsample_mode") or "16x"
    expect_equal("patch_size", patch, section(model, "vision_config").get("patch_size"))
    if mode not in MERGES:
        raise settings.error("downsample_mode", mode, ", ".join(MERGES))
    if mode != (theirs := model.get("downsample_mode") or "16x"):
        raise CheckpointError(
            f"downsample_mode: the processor's files say {mode}, the model's config says {theirs}",
            param="downsample_mode",
        )
    if not settings.flag("do_resize", True):
        raise settings.error("do_resize", False, "true")
    most = settings.count("max_slice_nums", 9)
    if most > MOST_TILES:
        raise settings.error("max_slice_nums", most, f"integers from 1 to {MOST_TILES}")
    numbers = Settings(processor, "processor_config.json").flag(
        "use_image_id", settings.flag("use_image_id", True)
    )
    result = MiniCPMProcessor(
        palette=Palette.read(settings, HALF, HALF),
        resample=read_filter(settings, Resampling.BICUBIC),
        patch=patch,
        merges=MERGES[mode],
        edge=settings.count("scale_resolution", 448),
        most=most if settings.flag("slice_mode", True) else 1,
        numbers=numbers,
        decoder_probe=begins_with_attention(model),
    )
    settings.close()
    return result
