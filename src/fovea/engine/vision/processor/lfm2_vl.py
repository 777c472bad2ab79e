"""The image processor of LFM2-VL: small pictures as they are, large ones in tiles with a view of the whole.

A picture is resized to whole tokens within a bound. One that is much larger is also cut into tiles, whose
number is chosen by the picture's shape. The prompt names the row and column of every tile.

Transformers computes these resizes with torchvision. Here PIL computes them, with the same filter and in the
same order of rows and columns. Some values differ by one level of 256: mostly a few in a thousand, up to a
tenth in pictures that become much smaller. A few in ten thousand differ by two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from PIL.Image import Resampling

from fovea.core.errors import CheckpointError
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.base import Capabilities, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.pixels import (
    HALF,
    Bytes,
    Palette,
    Values,
    cut_tiles,
    picture,
    read_filter,
    resize,
)
from fovea.engine.vision.processor.settings import Config, Settings, Size, expect_equal, section
from fovea.engine.vision.processor.sizes import (
    LEVEL_TOKENS,
    Bounds,
    expect_dimensions,
    patch_coordinates,
    read_bounds,
    trim,
    within_limits,
)
from fovea.kernels.native.pictures import Order

_TYPES = ("Lfm2VlImageProcessor",)
Pair = tuple[int, int]
"""(height, width) in pixels, or (rows, columns)."""


def fit_tokens(height: int, width: int, factor: int, least: int, most: int) -> Pair:
    """(height, width) of nearly the same aspect, multiples of `factor`, with least to most tokens.

    factor: edge of the square that becomes a token. A very elongated picture may exceed the bounds. The order
    of the floating-point operations is that of the reference.
    """
    edges = [max(factor, round(edge / factor) * factor) for edge in (height, width)]
    limits = least * factor**2, most * factor**2
    return within_limits(height, width, (edges[0], edges[1]), factor, *limits)


def choose_grid(height: int, width: int, tile: int, least: int, most: int) -> Pair:
    """(rows, columns) of least to most tiles whose shape is nearest to the picture's.

    Among grids that are equally near, a larger one is chosen if the picture has more than half of its pixels.
    """
    grids = sorted(
        ((rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)),
        key=lambda grid: (grid[0] * grid[1], grid[1]),
    )
    best, nearest = (1, 1), math.inf
    for rows, columns in grids:
        if rows * columns < least:
            continue
        distance = abs(width / height - columns / rows)
        if distance < nearest:
            best, nearest = (rows, columns), distance
        elif distance == nearest and height * width > 0.5 * tile * tile * rows * columns:
            best = (rows, columns)
    return best


@dataclass(frozen=True, slots=True)
class Lfm2VLProcessor:
    """Plans and prepares images for LFM2-VL.

    Budgets: "low" is at most 64 tokens and "medium" at most 256, both without tiles. `max_pixels` bounds the
        picture that is cut into tiles; if no number of tiles is within the bound, there are none, and it
        bounds the view of the whole. `min_pixels` bounds the picture in tiles, or, if there are none, that
        view from below.

    palette: normalisation of the pixels.
    resample: the filter of all resizes.
    patch: side of an encoder patch, in pixels.
    merge: patches along the side of a token.
    least, most: tokens of the view of the whole picture.
    tile: edge of a tile, in pixels.
    tiles: fewest and most tiles; None: pictures are not cut.
    tolerance: a picture is cut if it has more than this many times the pixels of `most` tokens.
    view: whether pictures in tiles have a view of the whole, too.
    names: whether the prompt names tiles, and marks where an image begins and ends.
    marker: text of one visual token.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(droppable=False)

    palette: Palette
    resample: Resampling
    patch: int
    merge: int
    least: int
    most: int
    tile: int
    tiles: Pair | None
    tolerance: float
    view: bool
    names: bool
    marker: str

    @property
    def factor(self) -> int:
        """Side in pixels of the square that becomes one visual token."""
        return self.patch * self.merge

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        bounds = read_bounds(budget)
        expect_dimensions(width, height, aspect=True)
        rows, columns = self._grid(height, width, bounds)
        whole = self._whole(height, width, bounds, tiled=rows > 0)
        sizes = ((rows * self.tile, columns * self.tile),) if rows else ()
        if self.view or not rows:
            sizes = (*sizes, whole)
        tokens = sum(size[0] * size[1] for size in sizes) // self.factor**2
        key = (
            f"lfm2_vl;{whole[0]}x{whole[1]};{rows}x{columns} tiles of {self.tile};view={self.view};"
            f"{self.resample.name};{self.palette.key};patch={self.patch};merge={self.merge}"
        )
        text = self._text(rows, columns, whole)
        return VisualPlan(width, height, tokens, (1, rows, columns), text, key, sizes)

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        plan.check(image)
        source = picture(image)
        resized = [_resize(source, *size, self.resample) for size in plan.sizes]
        arrays: dict[str, Values] = {}
        if plan.grid[1]:
            arrays["tiles"] = self._patches(cut_tiles(resized.pop(0), self.tile))
        if resized:
            arrays["pixel_values"] = self._patches(resized)
        return ProcessedImage(image.identity, plan, arrays)

    def _patches(self, pictures: list[Bytes]) -> Values:
        """Turn equal pictures (height, width, 3) into (pictures, patches, patch * patch * 3)."""
        patch, (height, width) = self.patch, pictures[0].shape[:2]
        places = patch_coordinates((1, height // patch, width // patch), 1) * patch
        rows = self.palette.patches(pictures, Order(places, patch, patch, channels_last=True))
        return rows.reshape(len(pictures), -1, rows.shape[1])

    def _grid(self, height: int, width: int, bounds: Bounds) -> Pair:
        """(rows, columns) of tiles; (0, 0): the picture is not cut. Raises InvalidRequest."""
        if self.tiles is None or bounds.level != "high":
            return 0, 0
        sides = (max(self.patch, round(edge / self.factor) * self.factor) for edge in (height, width))
        if math.prod(sides) <= self.most * self.factor**2 * self.tolerance:
            return 0, 0
        fewest, most = self.tiles
        if bounds.minimum is not None:
            if bounds.minimum > most * self.tile**2:
                raise bounds.refuse_minimum(
                    f"this model encodes this image in tiles of {most * self.tile**2} pixels at most"
                )
            fewest = max(fewest, -(-bounds.minimum // self.tile**2))
        if bounds.maximum is not None:
            most = min(most, bounds.maximum // self.tile**2)
        return choose_grid(height, width, self.tile, fewest, most) if fewest <= most else (0, 0)

    def _whole(self, height: int, width: int, bounds: Bounds, *, tiled: bool) -> Pair:
        """(height, width) of the view of the whole picture. Raises InvalidRequest."""
        square, most = self.factor**2, self.most
        if bounds.level in LEVEL_TOKENS:
            most = min(most, LEVEL_TOKENS[bounds.level])
        if bounds.maximum is not None:
            if bounds.maximum < square:
                raise bounds.refuse_maximum(f"this model accepts {square} (one token) or more")
            most = min(most, bounds.maximum // square)
        least = min(self.least, most)
        if bounds.minimum is not None and not tiled:
            if bounds.minimum > most * square:
                raise bounds.refuse_minimum(
                    f"this model encodes this image at {most * square} pixels at most"
                )
            least = max(least, -(-bounds.minimum // square))
        size = fit_tokens(height, width, self.factor, least, most)
        strict = bounds.explicit or bounds.level in LEVEL_TOKENS
        return trim(*size, self.factor, most * square) if strict else size

    def _text(self, rows: int, columns: int, whole: Pair) -> str:
        run = self.marker * (self.tile // self.factor) ** 2
        tiles = (
            f"<|img_row_{row}_col_{column}|>{run}" if self.names else run
            for row in range(1, rows + 1)
            for column in range(1, columns + 1)
        )
        text = "".join(tiles)
        if self.view or not rows:
            text += "<|img_thumbnail|>" if rows and self.names else ""
            text += self.marker * (whole[0] * whole[1] // self.factor**2)
        return f"<|image_start|>{text}<|image_end|>" if self.names else text


def _resize(source: Bytes, height: int, width: int, resample: Resampling) -> Bytes:
    """Resize along rows, then along columns, as torchvision does. PIL would order them by the sizes."""
    return resize(resize(source, len(source), width, resample), height, width, resample)


def build(preprocessor: Config, model: Config, processor: Config) -> Lfm2VLProcessor:
    settings = Settings(preprocessor)
    settings.processor_type(_TYPES, _TYPES[0])
    patch, merge = settings.count("encoder_patch_size", 16), settings.count("downsample_factor", 2)
    expect_equal("encoder_patch_size", patch, section(model, "vision_config").get("patch_size"))
    expect_equal("downsample_factor", merge, model.get("downsample_factor"))
    least, most = settings.count("min_image_tokens", 64), settings.count("max_image_tokens", 256)
    tiles = settings.count("min_tiles", 2), settings.count("max_tiles", 10)
    # The reference resizes every picture, whatever these say, and derives the number of patches itself.
    settings.flag("do_resize", True)
    settings.size("size", Size(height=512, width=512))
    settings.raw("max_num_patches")
    settings.raw("patch_size")
    # `do_pad` makes the patch counts of a batch equal. Here every image is its own batch.
    settings.flag("do_pad", True)
    cuts = settings.flag("do_image_splitting", True) and tiles != (1, 1)
    result = Lfm2VLProcessor(
        palette=Palette.read(settings, HALF, HALF),
        resample=read_filter(settings, Resampling.BILINEAR),
        patch=patch,
        merge=merge,
        least=least,
        most=most,
        tile=settings.count("tile_size", 512),
        tiles=tiles if cuts else None,
        tolerance=settings.number("max_pixels_tolerance", 2.0),
        view=settings.flag("use_thumbnail", True),
        names=bool(processor.get("use_image_special_tokens", True)),
        marker=str(processor.get("image_token") or "<image>"),
    )
    settings.close()
    if least > most or tiles[0] > tiles[1]:
        raise CheckpointError(
            f"min_image_tokens {least} to max_image_tokens {most}, min_tiles {tiles[0]} to max_tiles "
            f"{tiles[1]}; accepted: min_image_tokens up to {most}, min_tiles up to {tiles[1]}",
            param="min_image_tokens",
        )
    if cuts and tiles[0] == 1:
        # A picture in one tile would have the text of its view in the reference, which then fails.
        raise settings.error("min_tiles", 1, "2 or more, or 1 with max_tiles 1")
    if result.tile % result.factor:
        raise settings.error("tile_size", result.tile, f"a multiple of {result.factor}, the side of a token")
    return result
