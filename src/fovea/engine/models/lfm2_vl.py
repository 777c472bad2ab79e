"""LFM2-VL (Liquid AI, 2025): SigLIP 2 tiles of any shape, pixel unshuffle, and an LFM2 decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fovea.core.errors import UnsupportedModel
from fovea.engine.models.base import MLPProjector, VisionLanguageModel
from fovea.engine.models.text import text_renames
from fovea.engine.models.towers import naflex_tower
from fovea.engine.vision.calls import ProjectorLayer, apply_by_rows
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.siglip import NaflexTower
from fovea.planner.shape import Tower

TILE_EDGE = 512
"""Side of a tile of the published image processors, in pixels."""


class Lfm2VL(VisionLanguageModel):
    """LFM2-VL."""

    ignored = (r"^vision\.head\.",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.vision_config.model_type != "siglip2_vision_model":
            raise UnsupportedModel(
                f"vision tower {config.vision_config.model_type!r}; supported: siglip2_vision_model"
            )
        self.vision = NaflexTower(naflex_tower(config.vision_config))
        self.factor = config.downsample_factor
        self.projector = MLPProjector(
            config.vision_config.hidden_size * self.factor**2,
            config.projector_hidden_size,
            config.text_config.hidden_size,
            bias=config.projector_bias,
            activation=config.projector_hidden_act,
            eps=1e-5 if config.projector_use_layernorm else None,
        )
        self.renames = text_renames(config.text_config)

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        parts = []
        for name, _, grid in self._pictures(image.plan):
            x = yield from self.vision.slices(self.array_tensor(image, name), grid)
            rows = pixel_unshuffle(x.view(len(x), *grid, -1), self.factor)
            parts.append((yield from apply_by_rows(ProjectorLayer(self.projector), rows)))
        return VisualFeatures(torch.cat(parts))

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        pictures = [(count, grid) for _, count, grid in self._pictures(plan)]
        return self.vision.shape(pictures, rows_per_token=self.factor**2)

    def tower_shape(self) -> Tower:
        config, merged = self.vision.config, self.factor**2
        return Tower(
            config.hidden,
            merged,
            tiling="rest",
            tile_tokens=(TILE_EDGE // config.patch_size) ** 2 // merged,
            full_layers=config.depth,
            projector_rows_per_patch=1 / merged,
        )

    def _pictures(self, plan: VisualPlan) -> list[tuple[str, int, tuple[int, int]]]:
        """The tiles, if there are any, and the view of the whole image, in the order of their tokens.

        Each is the name of the processor's array, a number of pictures, and their grid in patches.
        """
        patch, (_, rows, columns) = self.vision.config.patch_size, plan.grid
        found, sizes = [], list(plan.sizes)
        if rows:
            height, width = sizes.pop(0)
            grid = (height // rows // patch, width // columns // patch)
            found.append(("tiles", rows * columns, grid))
        for height, width in sizes:
            found.append(("pixel_values", 1, (height // patch, width // patch)))
        return found


def pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    """Join factor x factor neighbouring patches into one row, row by row.

    x: (pictures, rows, columns, width). Returns (pictures * rows * columns / factor^2, width * factor^2).
    """
    pictures, rows, columns, width = x.shape
    x = x.view(pictures, rows // factor, factor, columns // factor, factor, width).transpose(2, 3)
    return x.reshape(-1, factor * factor * width)
