"""The image processor of LLaVA-NeXT (1.6): any-resolution tiles for CLIP.

A learned newline ends each row of features.

Source: llava-vl.github.io/blog/2024-01-30-llava-next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.anyres import Anyres, Layout, expect_same_canvases, size_without_border
from fovea.engine.vision.processor.base import (
    Arrays,
    Capabilities,
    ProcessedImage,
    VisualPlan,
    expect_planned,
    image_sizes,
)
from fovea.engine.vision.processor.regions import TileRegions
from fovea.engine.vision.processor.settings import Settings, Size, Tower, expect_equal

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
        expect_planned(image, plan)
        tiles = self.anyres.tiles(image, Layout(plan.sizes[0], plan.grid[1], plan.grid[2]))
        arrays: Arrays = {"pixel_values": tiles, "image_sizes": image_sizes(image)}
        return ProcessedImage(image.identity, plan, arrays)


def build(
    preprocessor: Mapping[str, Any], model: Mapping[str, Any], processor: Mapping[str, Any]
) -> LlavaNextProcessor:
    settings = Settings(preprocessor)
    settings.processor_type(("LlavaNextImageProcessor",), "LlavaNextImageProcessor")
    anyres = Anyres.read(settings, Size(shortest_edge=224), Size(height=224, width=224), _CANVASES)
    settings.close()
    tower = Tower.read(model, processor, image_size=336, patch_size=14, strategy="default")
    expect_equal("image_size", anyres.edge, tower.image_size)
    expect_same_canvases(anyres.canvases, model.get("image_grid_pinpoints"))
    return LlavaNextProcessor(anyres, tower, str(processor.get("image_token") or "<image>"))
