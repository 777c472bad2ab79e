"""DeepSeek-OCR 2 (arXiv 2601.20552): SAM's encoder, an encoder with queries, and a decoder with experts.

The checkpoints for transformers have two sets of tensor names: those of its classes, and those of the
authors, which transformers also writes. Both are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.linear import Embedding, Linear, parameter
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.text import Renames, text_renames
from fovea.engine.models.text.parts import rotary
from fovea.engine.vision.calls import ProjectorLayer, apply_by_rows
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.processor.deepseek_ocr2 import SHRINK, TILE_SIDE, VIEW_SIDE
from fovea.engine.vision.query_encoder import QueryEncoder, QueryEncoderConfig
from fovea.engine.vision.sam import SamConfig, SamEncoder
from fovea.planner.shape import Tower

_SAM = r"^model\.sam_model\."
_QWEN = r"^model\.qwen2_model\."
_RENAMES: Renames = (
    (_SAM + r"blocks\.(\d+)\.norm([12])\.", r"vision.sam_encoder.layers.\1.layer_norm\2."),
    (_SAM + r"blocks\.", "vision.sam_encoder.layers."),
    (_SAM + r"patch_embed\.proj\.", "vision.sam_encoder.patch_embed.projection."),
    (_SAM + r"neck\.0\.", "vision.sam_encoder.neck.conv1."),
    (_SAM + r"neck\.1\.", "vision.sam_encoder.neck.layer_norm1."),
    (_SAM + r"neck\.2\.", "vision.sam_encoder.neck.conv2."),
    (_SAM + r"neck\.3\.", "vision.sam_encoder.neck.layer_norm2."),
    (_SAM + r"net_2\.", "vision.sam_encoder.proj.conv1."),
    (_SAM + r"net_3\.", "vision.sam_encoder.proj.conv2."),
    (_SAM, "vision.sam_encoder."),
    (_QWEN + r"model\.model\.", "vision.vision_encoder."),
    (_QWEN + r"query_(768|1024)\.", r"vision.query_\1_resolution."),
    (r"^projector\.layers\.", "projector."),
    (r"^model\.view_sep[ae]rator$", "view_separator"),
)
"""The authors' names, and the separator in both sets of names."""


class _Tower(nn.Module):
    """Both encoders and the queries. Its attribute names are those of transformers' checkpoints."""

    def __init__(self, sam: SamConfig, encoder: QueryEncoderConfig) -> None:
        super().__init__()
        self.sam_encoder = SamEncoder(sam)
        self.vision_encoder = QueryEncoder(encoder)
        self.query_768_resolution = Embedding(TILE_SIDE**2, encoder.hidden)
        self.query_1024_resolution = Embedding(VIEW_SIDE**2, encoder.hidden)

    def slices(self, pixels: Tensor) -> Slices[Tensor]:
        """Encode pictures of one size, (pictures, channels, edge, edge): (pictures, queries, hidden)."""
        x = yield from self.sam_encoder.slices(pixels)
        small = x.shape[1] == TILE_SIDE**2
        queries = self.query_768_resolution if small else self.query_1024_resolution
        return (yield from self.vision_encoder.slices(x, queries.weight))


class DeepseekOcr2(VisionLanguageModel):
    """DeepSeek-OCR 2."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        sam = _sam(config.vision_config.sam_config)
        encoder = _query_encoder(config.vision_config.encoder_config)
        if encoder.hidden != sam.widths[1]:
            raise UnsupportedModel(
                f"encoder_config.hidden_size is {encoder.hidden}; accepted: the last of downsample_channels "
                f"({sam.widths[1]})"
            )
        width = config.text_config.hidden_size
        self.vision = _Tower(sam, encoder)
        self.projector = Linear(encoder.hidden, width, bias=True)
        self.view_separator = parameter(width)
        self.renames = (*_RENAMES, *text_renames(config.text_config))

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        parts = []
        for name in ("tiles", "pixel_values"):
            if name in image.arrays:
                x = yield from self.vision.slices(self.array_tensor(image, name))
                parts.append((yield from apply_by_rows(ProjectorLayer(self.projector), x.flatten(0, 1))))
        return VisualFeatures(torch.cat((*parts, self.view_separator[None])))

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        sam, encoder = self.vision.sam_encoder.config, self.vision.vision_encoder
        view = max(plan.sizes[0]) // (SHRINK * sam.patch)
        sides = [TILE_SIDE] * (plan.grid[1] * plan.grid[2]) + [view]
        tokens = sum(side**2 for side in sides)
        pairs = sum(sam.pairs(side * SHRINK) for side in sides)
        # The second encoder has another width, so its pairs count in proportion to that.
        later = sum(encoder.pairs(side**2, side**2) for side in sides)
        pairs += later * encoder.config.hidden // sam.hidden
        patches = tokens * SHRINK**2
        return VisualShape(patches, patches, tokens, sam.hidden, pairs, merged_rows=2 * tokens)

    def tower_shape(self) -> Tower:
        sam, encoder = self.vision.sam_encoder.config, self.vision.vision_encoder.config
        merge = SHRINK**2
        return Tower(
            hidden=sam.hidden,
            patches_per_token=merge,
            tiling="whole",
            tile_tokens=TILE_SIDE**2,
            tile_patches=TILE_SIDE**2 * merge,
            view_tokens=VIEW_SIDE**2 + 1,  # the last one separates the images of a prompt
            view_patches=VIEW_SIDE**2 * merge,
            full_layers=len(sam.whole),
            window_layers=sam.depth - len(sam.whole),
            window_rows=sam.window**2,
            padded_windows=True,
            merged_layers=encoder.depth,
            merged_rows_per_patch=2 / merge,
            # Of n rows and n queries, rows see rows, and queries see rows and the queries before them.
            merged_pairs=(1 + 1 + 0.5) / 4 * encoder.hidden / sam.hidden,
            projector_rows_per_patch=1 / merge,
        )

    def merged_modules(self) -> list[nn.Module]:
        return [self.vision.vision_encoder]


def _sam(config: Any) -> SamConfig:
    """Shape of SAM's encoder. Raises UnsupportedModel."""
    for name in ("image_size", "patch_size"):
        if not isinstance(getattr(config, name), int):
            raise UnsupportedModel(
                f"sam_config.{name} is {getattr(config, name)!r}; accepted: an integer, such as 16"
            )
    for name in ("use_abs_pos", "use_rel_pos"):
        if not getattr(config, name):
            raise UnsupportedModel(f"sam_config.{name} is false; accepted: true")
    widths, whole = tuple(config.downsample_channels), tuple(config.global_attn_indexes)
    if len(widths) != 2:
        raise UnsupportedModel(
            f"sam_config.downsample_channels is {list(widths)}; accepted: two widths, such as [512, 1024]"
        )
    if len(set(whole)) != len(whole) or not set(whole) <= set(range(config.num_hidden_layers)):
        raise UnsupportedModel(
            f"sam_config.global_attn_indexes is {list(whole)}; accepted: different numbers from 0 to "
            f"{config.num_hidden_layers - 1}"
        )
    return SamConfig(
        hidden=config.hidden_size,
        depth=config.num_hidden_layers,
        heads=config.num_attention_heads,
        intermediate=config.mlp_dim,
        activation=config.hidden_act,
        eps=config.layer_norm_eps,
        qkv_bias=config.qkv_bias,
        channels=config.num_channels,
        side=config.image_size // config.patch_size,
        patch=config.patch_size,
        window=config.window_size,
        whole=whole,
        neck=config.output_channels,
        widths=(widths[0], widths[1]),
    )


def _query_encoder(config: Any) -> QueryEncoderConfig:
    """Shape of the encoder with queries. Raises UnsupportedModel."""
    if set(config.layer_types) - {"full_attention"}:
        raise UnsupportedModel(
            f"encoder_config.layer_types is {config.layer_types}; accepted: full_attention in every layer"
        )
    return QueryEncoderConfig(
        hidden=config.hidden_size,
        depth=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        intermediate=config.intermediate_size,
        activation=config.hidden_act,
        eps=config.rms_norm_eps,
        rotary=rotary(config, config.hidden_size // config.num_attention_heads),
    )
