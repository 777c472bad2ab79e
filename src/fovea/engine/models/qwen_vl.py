"""Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923), Qwen3-VL and Qwen3.5, dense or with experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.qwen import QwenVisionConfig, QwenVisionTower, StaticQwen
from fovea.kernels.transfer import to_device
from fovea.planner.shape import Tower


class QwenVL(VisionLanguageModel):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

    ignored = (r"^mtp\.",)  # heads that predict several tokens at once

    def __init__(self, config: Any) -> None:
        vision = vision_config(config.model_type, config.vision_config)
        super().__init__(config, merge=vision.merge)
        self.expect_width(vision.out_hidden)
        self.video_token_id = config.video_token_id
        self.vision = QwenVisionTower(vision)

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        patches, grid = self.array_tensor(image), image.plan.grid
        segments = self.engines.find(grid)
        slices = (
            self.vision.slices(patches, grid)
            if segments is None
            else StaticQwen(self.vision).run(segments, patches, grid)
        )
        embeds, deepstack = yield from slices
        if image.plan.kept_cells is not None:
            index = to_device(torch.tensor(image.plan.kept_cells), embeds.device)
            embeds, deepstack = embeds[index], [features[index] for features in deepstack]
        return VisualFeatures(embeds, tuple(deepstack))

    def any_size_tower(self) -> QwenVisionTower:
        return self.vision

    def static_encoder(self) -> StaticQwen:
        return StaticQwen(self.vision)

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        return self.vision.shape(plan.grid)

    def tower_shape(self) -> Tower:
        return self.vision.tower_shape()

    def projector_modules(self) -> list[nn.Module]:
        return [self.vision.merger, self.vision.deepstack_merger_list]

    @property
    def visual_token_bytes(self) -> int:
        return super().visual_token_bytes * (1 + len(self.vision.config.deepstack))


def vision_config(model_type: str, vision: Any) -> QwenVisionConfig:
    """Shape of the vision tower of a transformers configuration `vision`. model_type: as in config.json."""
    generation = {"qwen2_vl": "2", "qwen2_5_vl": "2.5"}.get(model_type, "3")
    hidden = vision.embed_dim if generation == "2" else vision.hidden_size
    theta = float((getattr(vision, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
    return QwenVisionConfig(
        generation=generation,
        depth=vision.depth,
        hidden=hidden,
        heads=vision.num_heads,
        intermediate=int(hidden * vision.mlp_ratio) if generation == "2" else vision.intermediate_size,
        out_hidden=vision.hidden_size if generation == "2" else vision.out_hidden_size,
        activation=vision.hidden_act,
        channels=vision.in_channels,
        patch=vision.patch_size,
        temporal=vision.temporal_patch_size,
        merge=vision.spatial_merge_size,
        theta=theta,
        window=vision.window_size // vision.spatial_merge_size // vision.patch_size
        if generation == "2.5"
        else 0,
        full=tuple(vision.fullatt_block_indexes) if generation == "2.5" else (),
        positions=vision.num_position_embeddings if generation == "3" else 0,
        deepstack=tuple(getattr(vision, "deepstack_visual_indexes", ())),
    )
