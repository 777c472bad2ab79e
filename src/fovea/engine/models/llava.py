"""LLaVA-1.5 (arXiv 2310.03744), and its successors with tiles: LLaVA-NeXT and LLaVA-OneVision (2408.03326).

CLIP or SigLIP features, two linear maps, and a Llama or Qwen decoder. LLaVA-OneVision resamples features if
an image has too many patches.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.linear import parameter
from fovea.engine.models.base import MLPProjector, VisionLanguageModel
from fovea.engine.models.towers import clip_tower, siglip_tower
from fovea.engine.vision.calls import ProjectorLayer, apply_by_rows
from fovea.engine.vision.encoding import Slices, Tiler, VisualFeatures, VisualShape
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.vit import VisionTransformer, ViTConfig
from fovea.planner.shape import Tower

TOWERS = {"clip_vision_model": clip_tower, "siglip_vision_model": siglip_tower}


class Llava(VisionLanguageModel):
    """LLaVA-1.5: one tile per image."""

    ignored = (r"^vision\.post_layernorm\.", r"^vision\.head\.", r"^vision\.encoder\.layers\.")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        tower = tower_config(config)
        self.vision = VisionTransformer(tower)
        self.projector = projector_of(config, len(tower.taps))
        strategy = config.vision_feature_select_strategy
        if strategy not in ("default", "full"):
            raise UnsupportedModel(
                f"vision_feature_select_strategy {strategy!r}: accepted are default and full"
            )
        self.drop_first = strategy == "default"

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        tiles = yield from self.tiles(image)
        return VisualFeatures(tiles[0])

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        return self.vision.shape(1, dropped_rows=int(self.drop_first))

    def tower_shape(self) -> Tower:
        config, dropped = self.vision.config, int(self.drop_first)
        tokens = config.side**2 + int(config.class_token) - dropped
        return self.vision.tower_shape(tokens, dropped_rows=dropped)

    def tiles(self, image: ProcessedImage) -> Slices[Tensor]:
        """Encode the tiles of an image and project their patches: (tiles, patches, hidden)."""
        x = yield from self.vision.slices(self.array_tensor(image))
        x = x[:, 1:] if self.drop_first else x
        rows = yield from apply_by_rows(ProjectorLayer(self.projector), x.flatten(0, 1))
        return rows.view(*x.shape[:2], -1)


class TiledLlava(Llava):
    """LLaVA over tiles: first the whole image at low resolution, then its tiles.

    The patches of all tiles are laid out as one picture, with a newline token after each of its rows.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.newline = parameter(config.text_config.hidden_size)
        self.side = self.vision.config.side

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        tiles = yield from self.tiles(image)
        if tiles.shape[0] == 1:
            return VisualFeatures(torch.cat((tiles[0], self.newline[None])))
        picture = unpad(self.picture(tiles[1:], image.plan.grid), image.plan.height, image.plan.width)
        picture = self.shrink(picture)
        ends = self.newline[:, None, None].expand(-1, picture.shape[1], 1)
        rows = torch.cat((picture, ends), dim=-1).flatten(1).transpose(0, 1)
        return VisualFeatures(torch.cat((tiles[0], rows)))

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        return self.vision.shape(1 + plan.grid[1] * plan.grid[2], dropped_rows=int(self.drop_first))

    def tower_shape(self) -> Tower:
        # Each row of patches of the picture ends with a newline token, and so does a view that is alone.
        shape = super().tower_shape()
        return replace(
            shape,
            view_tokens=self.side**2 + 1,
            view_patches=self.side**2,
            tile_tokens=self.side * (self.side + 1),
        )

    def picture(self, tiles: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Lay tiles side by side.

        tiles: (rows * columns, side * side, hidden), where grid is (1, rows, columns).

        Returns (hidden, rows * side, columns * side).
        """
        rows, columns = grid[1], grid[2]
        picture = tiles.view(rows, columns, self.side, self.side, -1).permute(4, 0, 2, 1, 3)
        return picture.flatten(1, 2).flatten(2, 3)

    def shrink(self, picture: Tensor) -> Tensor:
        """Reduce a picture (hidden, rows, columns) with too many patches. LLaVA-NeXT keeps them all."""
        return picture


def projector_of(config: Any, taps: int) -> MLPProjector:
    """The projector of LLaVA and Pixtral. taps: outputs of the tower that each of its rows has."""
    width, bias = config.text_config.hidden_size, bool(config.multimodal_projector_bias)
    tower = config.vision_config.hidden_size * taps
    return MLPProjector(tower, width, width, bias=bias, activation=config.projector_hidden_act)


def unpad(picture: Tensor, height: int, width: int) -> Tensor:
    """Cut off the patches that cover padding.

    picture: (hidden, rows, columns).
    height, width: pixels of the source image.
    """
    rows, columns = picture.shape[1:]
    if width / height > columns / rows:
        content = int(round(height * (columns / width), 7))
        margin = (rows - content) // 2
        return picture[:, margin : rows - margin, :]
    content = int(round(width * (rows / height), 7))
    margin = (columns - content) // 2
    return picture[:, :, margin : columns - margin]


def tower_config(config: Any) -> ViTConfig:
    """Shape of the vision tower of a transformers configuration. Raises UnsupportedModel."""
    vision = config.vision_config
    if vision.model_type not in TOWERS:
        raise UnsupportedModel(f"vision tower {vision.model_type!r}; supported: {', '.join(TOWERS)}")
    return TOWERS[vision.model_type](
        vision, feature_taps(config.vision_feature_layer, vision.num_hidden_layers)
    )


def feature_taps(layer: int | list[int], depth: int) -> tuple[int, ...]:
    """Return the hidden states that `vision_feature_layer` names; 0: the embeddings, n: the n-th layer.

    layer: the setting; negative numbers count from the last hidden state.
    depth: number of layers of the tower.

    Raises UnsupportedModel for a layer that the tower does not have.
    """
    layers = [layer] if isinstance(layer, int) else list(layer)
    taps = tuple(tap if tap >= 0 else depth + 1 + tap for tap in layers)
    if not taps or not all(0 <= tap <= depth for tap in taps):
        raise UnsupportedModel(f"vision_feature_layer {layer} with {depth} layers")
    return taps


class LlavaNext(TiledLlava):
    """LLaVA-NeXT, which keeps all patches of all tiles."""

    def tiler(self) -> Tiler:
        return self


RESAMPLE_ABOVE = 1.1
"""A picture is resampled if its side is more than this many times the allowed one."""


class LlavaOnevision(TiledLlava):
    """LLaVA-OneVision. The setting `vision_aspect_ratio`, anyres_max_N, allows the patches of N tiles."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        prefix, _, number = str(config.vision_aspect_ratio).rpartition("_")
        if prefix != "anyres_max" or not number.isdigit():
            raise UnsupportedModel(
                f"vision_aspect_ratio {config.vision_aspect_ratio!r}; accepted: anyres_max_9 or another N"
            )
        self.max_tiles = int(number)

    def shrink(self, picture: Tensor) -> Tensor:
        rows, columns = picture.shape[1:]
        ratio = math.sqrt(rows * columns / (self.max_tiles * self.side**2))
        if ratio <= RESAMPLE_ABOVE:
            return picture
        size = [int(rows // ratio), int(columns // ratio)]
        return functional.interpolate(picture[None], size, mode="bilinear")[0]
