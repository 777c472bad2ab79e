"""Gemma 3: SigLIP features of one square image, averaged to a smaller grid, and sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.linear import Linear, RMSNorm
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.text import decoder_config
from fovea.engine.models.towers import siglip_tower
from fovea.engine.vision.calls import ProjectorLayer, apply_by_rows
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.vit import VisionTransformer
from fovea.planner.shape import Tower


class _InputProjection(Linear):
    """A linear map that checkpoints store as (in, out)."""

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        yield "../mm_input_projection_weight", self.weight.data.T


class _Projector(nn.Module):
    """A norm and a linear map."""

    rowwise = ("forward",)

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision = config.vision_config
        self.mm_soft_emb_norm = RMSNorm(vision.hidden_size, vision.layer_norm_eps, centered=True)
        self.projection = _InputProjection(vision.hidden_size, config.text_config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.mm_soft_emb_norm(x))  # type: ignore[no-any-return]


class Gemma3(VisionLanguageModel):
    """Gemma 3."""

    ignored = (r"^vision\.head\.",)

    def __init__(self, config: Any) -> None:
        decoder = decoder_config(config.text_config, tied=bool(config.tie_word_embeddings))
        tokens = config.mm_tokens_per_image
        super().__init__(config, decoder=replace(decoder, whole_images=tokens))
        vision = config.vision_config
        if vision.model_type != "siglip_vision_model":
            raise UnsupportedModel(f"vision tower {vision.model_type!r}; supported: siglip_vision_model")
        self.vision = VisionTransformer(siglip_tower(vision, (vision.num_hidden_layers,), post_norm=True))
        self.projector = _Projector(config)
        side = int(tokens**0.5)
        self.pooled = self.vision.config.side // side
        if side * side != tokens or side * self.pooled != self.vision.config.side:
            raise UnsupportedModel(
                f"mm_tokens_per_image is {tokens} for {self.vision.config.side}x{self.vision.config.side} "
                "patches; accepted: the square of a divisor of the side, such as "
                f"{self.vision.config.side**2}"
            )

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        x = yield from self.vision.slices(self.array_tensor(image))
        side = self.vision.config.side
        grid = x.transpose(1, 2).reshape(1, -1, side, side)
        rows = functional.avg_pool2d(grid, self.pooled).flatten(2)[0].T
        return VisualFeatures((yield from apply_by_rows(ProjectorLayer(self.projector), rows)))

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        return self.vision.shape(1, rows_per_token=self.pooled**2)

    def tower_shape(self) -> Tower:
        rows = self.pooled**2
        return self.vision.tower_shape(self.vision.config.side**2 // rows, rows_per_token=rows)
