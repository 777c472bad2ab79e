"""LFM2 (Liquid AI): short convolutions in most layers, attention in some."""

from __future__ import annotations

from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import DecoderConfig, Dense, LayerConfig, Mixer, ShortConv
from fovea.engine.models.text import Renames
from fovea.engine.models.text.parts import attention_shape, decoder_shape, head_dim, rotary

RENAMES: Renames = (
    (r"^(decoder\.layers\.\d+)\.operator_norm\.", r"\1.input_layernorm."),
    (r"^(decoder\.layers\.\d+)\.ffn_norm\.", r"\1.post_attention_layernorm."),
    (r"^(decoder\..*)\.self_attn\.out_proj\.", r"\1.self_attn.o_proj."),
    (r"^(decoder\..*)\.(q|k)_layernorm\.", r"\1.\2_norm."),
    (r"^(decoder\..*)\.feed_forward\.w1\.", r"\1.mlp.gate_proj."),
    (r"^(decoder\..*)\.feed_forward\.w3\.", r"\1.mlp.up_proj."),
    (r"^(decoder\..*)\.feed_forward\.w2\.", r"\1.mlp.down_proj."),
    (r"^decoder\.embedding_norm\.", "decoder.norm."),
)


def convert(text: Any, *, tied: bool) -> DecoderConfig:
    """See `text.decoder_config`."""
    size = head_dim(text)
    attention = attention_shape(text, size, qk_norm=True)
    mixers: dict[str, Mixer] = {
        "full_attention": attention,
        "conv": ShortConv(text.conv_L_cache, bool(text.conv_bias)),
    }
    unknown = sorted(set(text.layer_types) - set(mixers))
    if unknown or "full_attention" not in text.layer_types:
        raise UnsupportedModel(
            f"lfm2 with layers of type {sorted(set(text.layer_types))}; supported: full_attention in at "
            "least one layer, and conv"
        )
    block = Dense(_intermediate(text), "silu")
    return decoder_shape(
        text,
        (LayerConfig(mixers[kind], block) for kind in text.layer_types),
        rotary(text, size),
        eps=text.norm_eps,
        tied=tied,
    )


def _intermediate(text: Any) -> int:
    """Width of the feed-forward block. It may be two thirds of the configured width, rounded up."""
    width: int = text.intermediate_size
    if not text.block_auto_adjust_ff_dim:
        return width
    width = int(2 * width / 3)
    if text.block_ffn_dim_multiplier is not None:
        multiple = text.block_multiple_of
        width = -(-int(text.block_ffn_dim_multiplier * width) // multiple) * multiple
    return width
