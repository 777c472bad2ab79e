"""PaddleOCR-VL (arXiv 2510.14528): a SigLIP tower for any resolution, ERNIE-4.5's decoder with M-RoPE."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fovea.engine.layers.linear import LayerNorm, Linear
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.towers import axial_theta, siglip_tower
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.siglip import NaViT, ProjectedNaViT
from fovea.planner.shape import Tower

NORM_EPS = 1e-5
"""Constant of the projector's norm. The configuration does not have it."""


class Projector(nn.Module):
    """Joins the patches of a visual token and maps them to the decoder's width.

    hidden: width of the tower.
    joined: patches of a token.
    out: width of the decoder.
    """

    rowwise = ("forward",)

    def __init__(self, hidden: int, joined: int, out: int) -> None:
        super().__init__()
        self.width = hidden * joined
        self.pre_norm = LayerNorm(hidden, NORM_EPS)
        self.linear_1 = Linear(self.width, self.width, bias=True, activation="gelu")
        self.linear_2 = Linear(self.width, out, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.linear_1(self.pre_norm(x).view(-1, self.width)))  # type: ignore[no-any-return]


class PaddleOCRVL(VisionLanguageModel):
    """PaddleOCR-VL. It takes images and no videos.

    Its checkpoints have a pooling head and a second table of positions, which reading images does not use.
    """

    ignored = (r"^vision\.head\.", r"^vision\.embeddings\.packing_position_embedding\.")

    def __init__(self, config: Any) -> None:
        vision = config.vision_config
        merge: int = vision.spatial_merge_size
        super().__init__(config, merge=merge)
        shape = siglip_tower(vision, (vision.num_hidden_layers,), post_norm=True)
        self.vision = NaViT(shape, merge, axial_theta(vision))
        self.projector = Projector(vision.hidden_size, merge**2, config.text_config.hidden_size)

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        tokens, _ = yield from self.any_size_tower().slices(self.array_tensor(image), image.plan.grid)
        return VisualFeatures(tokens)

    def any_size_tower(self) -> ProjectedNaViT:
        return ProjectedNaViT(self.vision, self.projector)

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        return self.vision.shape(plan.grid)

    def tower_shape(self) -> Tower:
        return self.vision.tower_shape()
