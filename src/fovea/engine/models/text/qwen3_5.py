"""Qwen3.5 and its successors with the same layers: three of Gated DeltaNet to one of gated attention."""

from __future__ import annotations

from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import DecoderConfig, GatedDelta, LayerConfig, Mixer
from fovea.engine.models.text.parts import attention_shape, decoder_shape, feed_forward, head_dim, mrope

SECTIONS = (11, 11, 10)
"""The numbers of `mrope_section` for configurations that omit them."""


def convert(text: Any, *, tied: bool) -> DecoderConfig:
    """See `text.decoder_config`."""
    size, bias = head_dim(text), bool(text.attention_bias)
    attention = attention_shape(text, size, qkv_bias=bias, out_bias=bias, qk_norm=True, gated=True)
    delta = GatedDelta(
        key_heads=text.linear_num_key_heads,
        key_dim=text.linear_key_head_dim,
        value_heads=text.linear_num_value_heads,
        value_dim=text.linear_value_head_dim,
        kernel=text.linear_conv_kernel_dim,
        activation=text.hidden_act,
    )
    if delta.value_heads % delta.key_heads:
        raise UnsupportedModel(
            f"linear_num_value_heads is {delta.value_heads}; accepted: a multiple of linear_num_key_heads "
            f"({delta.key_heads})"
        )
    mixers: dict[str, Mixer] = {"full_attention": attention, "linear_attention": delta}
    unknown = sorted(set(text.layer_types) - set(mixers))
    if unknown or "full_attention" not in text.layer_types:
        raise UnsupportedModel(
            f"{text.model_type} with layers of type {sorted(set(text.layer_types))}; supported: "
            "full_attention in at least one layer, and linear_attention"
        )
    return decoder_shape(
        text,
        (LayerConfig(mixers[kind], feed_forward(text, n)) for n, kind in enumerate(text.layer_types)),
        mrope(text, size, SECTIONS, interleaved=True),
        centered_norms=True,
        tied=tied,
    )
