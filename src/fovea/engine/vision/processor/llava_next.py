"""The image processors of LLaVA-NeXT (1.6) and LLaVA-OneVision: any-resolution tiles for CLIP and for SigLIP.

A learned newline ends each row of features. LLaVA-OneVision interpolates features above a limit down.

Sources: llava-vl.github.io/blog/2024-01-30-llava-next; "LLaVA-OneVision: Easy Visual Task Transfer"
(arXiv:2408.03326), section 3.2.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from fovea.core.errors import CheckpointError
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.anyres import Anyres, Layout, expect_same_canvases, size_without_border
from fovea.engine.vision.processor.base import Capabilities, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.regions import TileRegions
from fovea.engine.vision.processor.settings import Config, Settings, Size, Tower, expect_equal
from fovea.engine.vision.processor.sizes import Bounds, expect_dimensions, expect_fixed, read_bounds

_CANVASES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True, slots=True)
class LlavaNextProcessor:
    """Plans and prepares images for LLaVA-NeXT.

    Budgets: `max_pixels` and `min_pixels` restrict the canvases by area; the smallest ones are always below
        the upper bound. "low" allows only the smallest ones. The view of the whole picture at the tower's
        size is added to the tiles, for every budget.

    anyres: the tiling.
    tower: the vision tower's sizes.
    marker: text of one visual token.
    """

    anyres: Anyres
    tower: Tower
    marker: str

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(regions=TileRegions(self.anyres, self.tower, self.process))

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        layout = self.anyres.lay_out(width, height, budget)
        side = self.tower.side
        lines, length = size_without_border(height, width, side * layout.rows, side * layout.columns)
        tokens = self.tower.rows(side * side) + lines * (length + 1)
        grid = (1, layout.rows, layout.columns)
        key = self.anyres.key("llava_next", layout)
        return VisualPlan(width, height, tokens, grid, self.marker * tokens, key, (layout.inner,))

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        return process_tiles(self.anyres, image, plan)


def process_tiles(anyres: Anyres, image: Image, plan: VisualPlan) -> ProcessedImage:
    """Prepare an image in tiles, or the view of the whole image alone.

    The model needs the size of the source image to cut the padding off its features.
    """
    plan.check(image)
    if plan.grid[1]:
        tiles = anyres.tiles(image, Layout(plan.sizes[0], plan.grid[1], plan.grid[2]))
    else:
        tiles = anyres.whole_view(image)
    arrays = {"pixel_values": tiles, "image_sizes": np.array([[image.height, image.width]], dtype=np.int64)}
    return ProcessedImage(image.identity, plan, arrays)


def build(preprocessor: Config, model: Config, processor: Config) -> LlavaNextProcessor:
    settings = Settings(preprocessor)
    settings.processor_type(("LlavaNextImageProcessor",), "LlavaNextImageProcessor")
    anyres = Anyres.read(settings, Size(shortest_edge=224), Size(height=224, width=224), _CANVASES)
    settings.close()
    tower = Tower.read(model, processor, image_size=336, patch_size=14, strategy="default")
    expect_equal("image_size", anyres.edge, tower.image_size)
    expect_same_canvases(anyres.canvases, model.get("image_grid_pinpoints"))
    return LlavaNextProcessor(anyres, tower, str(processor.get("image_token") or "<image>"))


_EDGES = (384, 768, 1152, 1536, 1920, 2304)
_ONEVISION_CANVASES = tuple((height, width) for height in _EDGES for width in _EDGES)


def limit_features(rows: int, columns: int, side: int, max_tiles: int) -> tuple[int, int]:
    """(rows, columns) of features after the interpolation to the limit.

    Features are interpolated if they exceed `max_tiles` tiles of side**2 features by more than 21%.
    """
    ratio = math.sqrt(rows * columns / (max_tiles * side**2))
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)


@dataclass(frozen=True, slots=True)
class LlavaOnevisionProcessor:
    """Plans and prepares images for LLaVA-OneVision.

    If a conversation has several images, they are not tiled. The model was trained on one view of the whole
    picture on a square then, with a single newline after it.

    Budgets: as for LLaVA-NeXT. One image among several has the tower's fixed size, and ignores `max_pixels`.

    anyres: the tiling.
    tower: the vision tower's sizes.
    max_tiles: the N of "anyres_max_N": the limit of features, in tiles.
    marker: text of one visual token.
    """

    anyres: Anyres
    tower: Tower
    max_tiles: int
    marker: str

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        side = self.tower.side
        if images > 1:
            return self._plan_whole_view(width, height, budget, self.tower.rows(side * side) + 1)
        layout = self.anyres.lay_out(width, height, budget)
        lines, length = size_without_border(height, width, side * layout.rows, side * layout.columns)
        lines, length = limit_features(lines, length, side, self.max_tiles)
        tokens = self.tower.rows(side * side) + lines * (length + 1)
        grid = (1, layout.rows, layout.columns)
        key = self.anyres.key("llava_onevision", layout)
        return VisualPlan(width, height, tokens, grid, self.marker * tokens, key, (layout.inner,))

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        return process_tiles(self.anyres, image, plan)

    def _plan_whole_view(self, width: int, height: int, budget: PixelBudget, tokens: int) -> VisualPlan:
        edge = self.anyres.edge
        expect_fixed(Bounds(read_bounds(budget).minimum, None), edge * edge, "one image among several")
        expect_dimensions(width, height)
        key = f"llava_onevision;alone;{self.anyres.fit.key};{self.anyres.palette.key}"
        return VisualPlan(width, height, tokens, (1, 0, 0), self.marker * tokens, key, ((edge, edge),))


def build_onevision(preprocessor: Config, model: Config, processor: Config) -> LlavaOnevisionProcessor:
    settings = Settings(preprocessor)
    settings.processor_type(("LlavaOnevisionImageProcessor",), "LlavaOnevisionImageProcessor")
    anyres = Anyres.read(settings, Size(height=384, width=384), None, _ONEVISION_CANVASES)
    settings.close()
    tower = Tower.read(model, _without_class_token(processor), image_size=384, patch_size=14, strategy="full")
    expect_equal("image_size", anyres.edge, tower.image_size)
    if processor.get("num_image_tokens") is not None:
        expect_equal("num_image_tokens", processor["num_image_tokens"], tower.side**2)
    expect_same_canvases(anyres.canvases, model.get("image_grid_pinpoints"))
    marker = str(processor.get("image_token") or "<image>")
    return LlavaOnevisionProcessor(anyres, tower, _max_tiles(model, processor), marker)


def _without_class_token(processor: Config) -> Config:
    """The processor's settings for a tower without a class token, where all rows are patches."""
    return {**processor, "num_additional_image_tokens": 0}


def _max_tiles(model: Config, processor: Config) -> int:
    name = "vision_aspect_ratio"
    theirs = model.get(name) or "anyres_max_9"
    ours = processor.get(name) or theirs
    match = re.fullmatch(r"anyres_max_([1-9]\d*)", str(ours))
    if match is None or ours != theirs:
        raise CheckpointError(
            f"{name}: the processor's files say {ours!r}, the model's config says {theirs!r}; accepted: "
            "equal values, 'anyres_max_N' with N of at least 1",
            param=name,
        )
    return int(match[1])
