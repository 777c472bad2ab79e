"""MiniCPM-V 4.6 (OpenBMB): a SigLIP tower that merges patches half-way, and the decoder of Qwen3.5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import DecoderConfig
from fovea.engine.layers.linear import LayerNorm, Linear
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.text import decoder_config
from fovea.engine.models.towers import siglip_tower
from fovea.engine.vision.calls import ProjectorLayer, apply_by_rows
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.siglip import SQUARE, MergingViT, Pictures
from fovea.planner.shape import Tower

NORM_EPS = 1e-6
"""Constant of the projector's norm. The configuration does not have it."""


class Merge(nn.Module):
    """Joins four rows of the tower and maps them to the decoder's width."""

    rowwise = ("forward",)

    def __init__(self, hidden: int, out: int) -> None:
        super().__init__()
        self.width = hidden * SQUARE
        self.pre_norm = LayerNorm(self.width, NORM_EPS)
        self.linear_1 = Linear(self.width, self.width, bias=True, activation="gelu")
        self.linear_2 = Linear(self.width, out, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.linear_1(self.pre_norm(x.view(-1, self.width))))  # type: ignore[no-any-return]


class Projector(nn.Module):
    """The projector, under the attribute name of the checkpoints: a list of one merge."""

    def __init__(self, hidden: int, out: int) -> None:
        super().__init__()
        self.mlp = nn.ModuleList([Merge(hidden, out)])

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp[0](x)  # type: ignore[no-any-return]


class MiniCPMV4_6(VisionLanguageModel):
    """MiniCPM-V 4.6. It takes images and no videos.

    With the setting `downsample_mode` "4x", the tower does not merge, and images have four times as many
    visual tokens. The weights of the merge are in the checkpoint nevertheless.
    """

    renames = ((r"^model\.merger\.", "projector."),)

    def __init__(self, config: Any) -> None:
        tied = bool(config.tie_word_embeddings)
        decoder = with_plain_positions(decoder_config(config.text_config, tied=tied))
        super().__init__(config, decoder=decoder)
        vision = config.vision_config
        check(config)
        merges = config.downsample_mode == "16x"
        self.vision = MergingViT(
            siglip_tower(vision, (vision.num_hidden_layers,), post_norm=True),
            config.insert_layer_id + 1 if merges else None,
        )
        self.projector = Projector(vision.hidden_size, config.text_config.hidden_size)
        self.ignored = () if merges else (r"^vision\.vit_merger\.",)

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        parts = []
        for name, (_, grid) in zip(("pixel_values", "tiles"), self._pictures(image.plan), strict=False):
            rows = yield from self.vision.slices(self.array_tensor(image, name), grid)
            parts.append((yield from apply_by_rows(ProjectorLayer(self.projector), rows, unit=SQUARE)))
        return VisualFeatures(torch.cat(parts))

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        return self.vision.shape(self._pictures(plan))

    def tower_shape(self) -> Tower:
        return self.vision.tower_shape()

    def merged_modules(self) -> list[nn.Module]:
        return self.vision.merged_modules()

    def _pictures(self, plan: VisualPlan) -> Pictures:
        """The view of the whole image, and the tiles if there are any, in the order of their tokens."""
        patch, (_, rows, columns) = self.vision.config.patch_size, plan.grid
        (height, width), *canvas = plan.sizes
        found = [(1, (height // patch, width // patch))]
        for height, width in canvas:
            found.append((rows * columns, (height // rows // patch, width // columns // patch)))
        return found


def with_plain_positions(config: DecoderConfig) -> DecoderConfig:
    """Return a decoder whose tokens have one position each, the number of the token.

    In this family, Qwen3.5's three coordinates of a position are always equal.
    """
    return replace(config, rotaries=tuple(replace(rotary, axes=None) for rotary in config.rotaries))


def check(config: Any) -> None:
    """Raise UnsupportedModel for settings of the tower and the projector that are not computed."""
    vision = config.vision_config
    for name in ("image_size", "patch_size"):
        if not isinstance(getattr(vision, name), int):
            raise UnsupportedModel(
                f"vision_config.{name} is {getattr(vision, name)!r}; supported: an integer"
            )
    if not 0 <= config.insert_layer_id < vision.num_hidden_layers:
        raise UnsupportedModel(
            f"insert_layer_id is {config.insert_layer_id}; supported: 0 to {vision.num_hidden_layers - 1}, "
            "the last layer of the vision tower"
        )
    expected: dict[str, tuple[Any, Any, str]] = {
        "downsample_mode": (config.downsample_mode, ("4x", "16x"), "4x and 16x"),
        "merger_times": (config.merger_times, (1,), "1"),
        "merge_kernel_size": (tuple(config.merge_kernel_size), ((2, 2),), "[2, 2]"),
        "vision_config.window_kernel_size": (tuple(vision.window_kernel_size), ((2, 2),), "[2, 2]"),
        "drop_vision_last_layer": (bool(config.drop_vision_last_layer), (False,), "false"),
    }
    for name, (value, accepted, words) in expected.items():
        if value not in accepted:
            raise UnsupportedModel(f"{name} is {value!r}; supported: {words}")
