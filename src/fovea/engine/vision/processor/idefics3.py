"""The image processor of Idefics3 and SmolVLM: the picture cut into tiles, and a view of the whole picture.

The picture is first resized to a fixed longest edge. Every tile becomes the same number of tokens, and the
prompt names its row and column before them. Source: "Building and better understanding vision-language
models" (arXiv:2408.12637), section 2.2; SmolVLM (arXiv:2504.05299).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL.Image import Resampling

from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.base import Arrays, Capabilities, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.pixels import HALF, Palette, cut_tiles, picture, read_filter, resize
from fovea.engine.vision.processor.settings import Config, Settings, Size, Tower, expect_equal
from fovea.engine.vision.processor.sizes import Bounds, expect_dimensions, geometric_mean, read_bounds

_TYPES = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
_MAX_EDGE = 4096
"""Longest edge of a resized picture in pixels, even if the checkpoint allows more."""

Pair = tuple[int, int]
"""(height, width) in pixels."""


def with_longest_edge(height: int, width: int, edge: int) -> Pair:
    """(height, width) of equal aspect whose longer edge is `edge`.

    The shorter edge is rounded up to an even number. If the longer edge is above 4096, the result is then
    shrunk to that.
    """
    height, width = _scale(height, width, edge, even=True)
    return _scale(height, width, _MAX_EDGE, even=False) if max(height, width) > _MAX_EDGE else (height, width)


def _scale(height: int, width: int, edge: int, *, even: bool) -> Pair:
    aspect = width / height
    short = int(edge / aspect) if width >= height else int(edge * aspect)
    short = max(1, short + short % 2 if even else short)
    return (short, edge) if width >= height else (edge, short)


def round_up_to_tiles(height: int, width: int, tile: int) -> Pair:
    """(height, width), both rounded up to multiples of `tile`.

    The longer edge is rounded first. The shorter edge is then scaled in proportion and rounded.
    """
    aspect = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return math.ceil(int(width / aspect) / tile) * tile, width
    height = math.ceil(height / tile) * tile
    return height, math.ceil(int(height * aspect) / tile) * tile


@dataclass(frozen=True, slots=True)
class Idefics3Processor:
    """Plans and prepares images for Idefics3 and SmolVLM.

    Budgets: "low" is the global view alone. "medium" is a longest edge between that of a tile and the model's
        own.
    `max_pixels` bounds the canvas that is cut into tiles, from above: the longest edge is lowered, one tile
    at a time. The global view, of one tile, does not count. `min_pixels` bounds the canvas from below.

    palette: normalisation of the pixels.
    resample: the filter of all resizes.
    size: target of the first resize; None: there is no first resize.
    tile: edge of a tile, in pixels.
    splits: whether pictures are cut into tiles at all.
    tile_tokens: visual tokens per tile.
    marker: text of one visual token.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(droppable=False)

    palette: Palette
    resample: Resampling
    size: Size | None
    tile: int
    splits: bool
    tile_tokens: int
    marker: str

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        bounds = read_bounds(budget)
        expect_dimensions(width, height)
        first, second = self._fit_budget(height, width, bounds)
        rows, columns = (
            (second[0] // self.tile, second[1] // self.tile) if max(second) > self.tile else (0, 0)
        )
        tokens = (rows * columns + 1) * self.tile_tokens
        key = (
            f"idefics3;{first[0]}x{first[1]};{second[0]}x{second[1]};{rows}x{columns} tiles of {self.tile};"
            f"{self.resample.name};{self.palette.key}"
        )
        text = self._text(rows, columns)
        return VisualPlan(width, height, tokens, (1, rows, columns), text, key, (first, second))

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        """Prepare the tiles and the global view.

        There are two resizes, not one: the models were trained on pictures that were resampled twice.
        """
        plan.check(image)
        canvas = picture(image)
        for height, width in plan.sizes:
            canvas = resize(canvas, height, width, self.resample)
        tiles = cut_tiles(canvas, self.tile)
        if plan.grid[1]:
            tiles.append(resize(canvas, self.tile, self.tile, self.resample))
        # All tiles are full, because the canvas was rounded up to whole tiles.
        mask = np.ones((len(tiles), self.tile, self.tile), np.bool_)
        arrays: Arrays = {"pixel_values": self.palette.tiles(tiles), "pixel_attention_mask": mask}
        return ProcessedImage(image.identity, plan, arrays)

    def _fit_budget(self, height: int, width: int, bounds: Bounds) -> tuple[Pair, Pair]:
        """The two resizes for the largest longest edge whose canvas is within the budget.

        Raises InvalidRequest.
        """
        areas = []
        for first in self._first_resizes(height, width, bounds):
            second = (self.tile, self.tile)
            if self.splits and bounds.level != "low":
                second = round_up_to_tiles(*first, self.tile)
            areas.append(second[0] * second[1])
            if bounds.maximum is None or areas[-1] <= bounds.maximum:
                if bounds.minimum is not None and areas[-1] < bounds.minimum:
                    raise bounds.refuse_minimum(
                        f"within the budget this model encodes this image at {areas[-1]} pixels"
                    )
                return first, second
        raise bounds.refuse_maximum(f"this model encodes this image at {min(areas)} pixels or more")

    def _first_resizes(self, height: int, width: int, bounds: Bounds) -> Iterator[Pair]:
        if self.size is None:
            yield height, width
        elif self.size.longest_edge is None:
            yield self.size.fixed_size or (height, width)
        else:
            edge = self.size.longest_edge
            if bounds.level == "medium":
                edge = geometric_mean(min(edge, self.tile), edge)
            yield with_longest_edge(height, width, edge)
            if bounds.maximum is not None:
                for tiles in range((min(edge, _MAX_EDGE) - 1) // self.tile, 0, -1):
                    yield with_longest_edge(height, width, tiles * self.tile)

    def _text(self, rows: int, columns: int) -> str:
        run = self.marker * self.tile_tokens
        lines = (
            "".join(f"<fake_token_around_image><row_{r}_col_{c}>{run}" for c in range(1, columns + 1)) + "\n"
            for r in range(1, rows + 1)
        )
        split = "".join(lines) + "\n" if rows else ""
        return f"{split}<fake_token_around_image><global-img>{run}<fake_token_around_image>"


def build(preprocessor: Config, model: Config, processor: Config) -> Idefics3Processor:
    settings = Settings(preprocessor)
    settings.processor_type(_TYPES, _TYPES[0])
    size = settings.size("size", Size(longest_edge=4 * 364), square=settings.flag("default_to_square", True))
    if size is None or not (size.longest_edge or size.fixed_size):
        raise settings.error("size", size, "longest_edge, or height and width")
    most = settings.size("max_image_size", Size(longest_edge=364))
    if most is None or not most.longest_edge:
        raise settings.error("max_image_size", most, "longest_edge")
    palette = Palette.read(settings, HALF, HALF)
    resample = read_filter(settings, Resampling.LANCZOS)
    resizes, splits = settings.flag("do_resize", True), settings.flag("do_image_splitting", True)
    # `do_pad` makes the tile counts of a batch equal. Here every image is its own batch.
    settings.flag("do_pad", True)
    settings.close()
    tile = most.longest_edge
    tokens = _tile_tokens(tile, model, processor)
    marker = str(processor.get("image_token") or "<image>")
    return Idefics3Processor(palette, resample, size if resizes else None, tile, splits, tokens, marker)


def _tile_tokens(tile: int, model: Config, processor: Config) -> int:
    """Visual tokens of a tile.

    The connector's pixel shuffle merges scale_factor**2 patches into one token.
    """
    tower = Tower.read(model, {}, image_size=224, patch_size=32, strategy="full")
    tokens = (tile // tower.patch_size) ** 2 // int(model.get("scale_factor") or 2) ** 2
    if processor.get("image_seq_len") is not None:
        expect_equal("image_seq_len", processor["image_seq_len"], tokens)
    return tokens
