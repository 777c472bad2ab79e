"""Idefics3 (arXiv 2408.12637) and SmolVLM (arXiv 2504.05299): SigLIP tiles, pixel shuffle, Llama decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fovea.engine.layers.linear import Linear
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.towers import siglip_tower
from fovea.engine.vision.calls import ProjectorLayer, apply_by_rows
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.vit import VisionTransformer
from fovea.planner.shape import Tower


class _Projection(nn.Module):
    rowwise = ("forward",)

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.proj = Linear(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)  # type: ignore[no-any-return]


class Idefics3(VisionLanguageModel):
    """Idefics3 and SmolVLM."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        vision = config.vision_config
        self.vision = VisionTransformer(siglip_tower(vision, (vision.num_hidden_layers,), post_norm=True))
        self.factor = config.scale_factor
        self.projector = _Projection(vision.hidden_size * self.factor**2, config.text_config.hidden_size)

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        pixels = self.array_tensor(image)
        mask = torch.from_numpy(image.arrays["pixel_attention_mask"]).bool()
        size = self.vision.config.patch_size
        patches = mask.unfold(1, size, size).unfold(2, size, size).flatten(3).any(-1)
        x = yield from self.vision.slices(pixels, patches)
        tokens = pixel_shuffle(x, self.factor).flatten(0, 1)
        return VisualFeatures((yield from apply_by_rows(ProjectorLayer(self.projector), tokens)))

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        return self.vision.shape(1 + plan.grid[1] * plan.grid[2], rows_per_token=self.factor**2)

    def tower_shape(self) -> Tower:
        rows = self.factor**2
        return self.vision.tower_shape(self.vision.config.side**2 // rows, rows_per_token=rows)


def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """Join factor x factor neighbouring rows of each tile into one.

    x: (tiles, side * side, hidden). Returns (tiles, side * side / factor^2, hidden * factor^2).
    """
    tiles, length, width = x.shape
    side = int(length**0.5)
    small = side // factor
    x = x.view(tiles, small, factor, small, factor * width).transpose(2, 3)
    return x.reshape(tiles, small * small, factor * factor * width)
