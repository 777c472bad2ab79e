"""Gemma 3 (arXiv 2503.19786): five layers with a sliding window to one without, and norms on both sides."""

from __future__ import annotations

from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import Attention, DecoderConfig, Dense, LayerConfig
from fovea.engine.models.text.parts import decoder_shape, head_dim, rotary

KINDS = ("full_attention", "sliding_attention")


def convert(text: Any, *, tied: bool) -> DecoderConfig:
    """See `text.decoder_config`."""
    size, bias = head_dim(text), bool(text.attention_bias)
    if text.attn_logit_softcapping is not None:
        raise UnsupportedModel("attn_logit_softcapping is set; supported: null")
    if text.use_bidirectional_attention:
        raise UnsupportedModel("use_bidirectional_attention is set; supported: false")
    unknown = sorted(set(text.layer_types) - set(KINDS))
    if unknown:
        raise UnsupportedModel(f"gemma3 with layers of type {unknown}; supported: {', '.join(KINDS)}")

    def layer(kind: str) -> LayerConfig:
        windowed = kind == "sliding_attention"
        attention = Attention(
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=size,
            scale=text.query_pre_attn_scalar**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            rotary=KINDS.index(kind),
            window=text.sliding_window if windowed else None,
        )
        return LayerConfig(attention, Dense(text.intermediate_size, text.hidden_activation), sandwich=True)

    return decoder_shape(
        text,
        (layer(kind) for kind in text.layer_types),
        *(rotary(text, size, text.rope_parameters[kind], layer_type=kind) for kind in KINDS),
        centered_norms=True,
        tied=tied,
        embedding_scale=float(text.hidden_size) ** 0.5,
        logit_cap=text.final_logit_softcapping or 0.0,
    )
