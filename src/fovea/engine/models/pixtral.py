"""Models with a Pixtral tower: Pixtral (arXiv 2410.07073), Mistral 3, Ministral 3 and LightOnOCR.

In Pixtral each patch is one visual token. The others merge squares of patches into one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.linear import Linear, RMSNorm
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.llava import feature_taps, projector_of
from fovea.engine.vision.calls import ProjectorLayer, apply_by_rows
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.pixtral import PixtralConfig, PixtralTower
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.planner.shape import Tower


class _PatchMerger(nn.Module):
    def __init__(self, hidden: int, merged: int) -> None:
        super().__init__()
        self.merging_layer = Linear(hidden * merged, hidden, bias=False)


class MergingProjector(nn.Module):
    """Merges squares of patches, and maps them to the decoder's width. The names are those of checkpoints.

    config: a transformers configuration; LightOnOCR's has no fields for activation and bias.
    merged: patches that become one visual token.
    """

    rowwise = ("forward",)

    def __init__(self, config: Any, merged: int) -> None:
        super().__init__()
        self.hidden, self.merged = config.vision_config.hidden_size, merged
        width = config.text_config.hidden_size
        bias = bool(getattr(config, "multimodal_projector_bias", False))
        act = getattr(config, "projector_hidden_act", "gelu")
        self.norm = RMSNorm(self.hidden, config.text_config.rms_norm_eps)
        self.patch_merger = _PatchMerger(self.hidden, merged)
        self.linear_1 = Linear(self.hidden, width, bias=bias, activation=act)
        self.linear_2 = Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Project patches (tokens * merged, hidden); the patches of a token are neighbours.

        The checkpoints' merging layer expects the values of a token ordered by column of the tower's output
        first, and by patch second.
        """
        x = self.norm(x).view(-1, self.merged, self.hidden).transpose(1, 2).flatten(1)
        return self.linear_2(self.linear_1(self.patch_merger.merging_layer(x)))  # type: ignore[no-any-return]


class Pixtral(VisionLanguageModel):
    """Pixtral, Mistral 3, Ministral 3 and LightOnOCR."""

    ignored = (r"^vision\.transformer\.layers\.",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        tower = tower_config(config)
        self.vision = PixtralTower(tower)
        merges = config.model_type != "llava"
        self.side = config.spatial_merge_size if merges else 1
        self.projector: nn.Module
        if merges:
            if len(tower.taps) != 1:
                raise UnsupportedModel(
                    f"vision_feature_layer {config.vision_feature_layer}: {config.model_type} reads one layer"
                )
            self.projector = MergingProjector(config, self.side**2)
        else:
            self.projector = projector_of(config, len(tower.taps))

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        _, rows, columns = image.plan.grid
        x = yield from self.vision.slices(self.array_tensor(image), (rows, columns))
        x = gather_squares(x, (rows, columns), self.side)
        return VisualFeatures(
            (yield from apply_by_rows(ProjectorLayer(self.projector), x, unit=self.side**2))
        )

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        _, rows, columns = plan.grid
        return self.vision.shape((rows, columns), (rows // self.side) * (columns // self.side))

    def tower_shape(self) -> Tower:
        config = self.vision.config
        merged = self.side**2
        return Tower(config.hidden, merged, full_layers=config.depth, projector_rows_per_patch=1 / merged)


def gather_squares(x: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """Reorder patches so that those of each square of side x side patches are neighbours.

    Patches beyond the last whole square are left out.

    x: (rows * columns, width), row by row, where grid is (rows, columns).
    """
    down, across = grid[0] // side, grid[1] // side
    picture = x.view(*grid, -1)[: down * side, : across * side]
    return picture.reshape(down, side, across, side, -1).transpose(1, 2).reshape(-1, x.shape[1])


def tower_config(config: Any) -> PixtralConfig:
    """Shape of the vision tower of a transformers configuration. Raises UnsupportedModel."""
    vision = config.vision_config
    if vision.model_type != "pixtral":
        raise UnsupportedModel(
            f"vision tower {vision.model_type!r} in {config.model_type}; supported: pixtral"
        )
    strategy = getattr(config, "vision_feature_select_strategy", "full")
    if strategy != "full":
        raise UnsupportedModel(
            f"vision_feature_select_strategy {strategy!r}: a Pixtral tower has no class token; accepted: full"
        )
    rope = vision.rope_parameters
    if rope.get("rope_type", "axial") != "axial":
        raise UnsupportedModel(f"RoPE of type {rope['rope_type']!r} in the vision tower; supported: axial")
    if vision.hidden_size // vision.num_attention_heads % 4:
        raise UnsupportedModel(
            f"vision tower with hidden_size {vision.hidden_size} and {vision.num_attention_heads} heads: "
            "supported are heads of a multiple of 4 columns"
        )
    if not isinstance(vision.patch_size, int):
        raise UnsupportedModel(f"patch_size {vision.patch_size} of the vision tower; supported: one integer")
    return PixtralConfig(
        hidden=vision.hidden_size,
        heads=vision.num_attention_heads,
        intermediate=vision.intermediate_size,
        activation=vision.hidden_act,
        patch=vision.patch_size,
        channels=vision.num_channels,
        theta=float(rope["rope_theta"]),
        taps=feature_taps(getattr(config, "vision_feature_layer", -1), vision.num_hidden_layers),
    )
