"""The decoder of DeepSeek-OCR 2: plain attention, and in most layers experts beside a shared expert."""

from __future__ import annotations

from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import DecoderConfig, Dense, Experts, FeedForward, LayerConfig
from fovea.engine.models.text.parts import attention_shape, decoder_shape, head_dim, rotary

RENAMES = ((r"^(decoder\.layers\.\d+\.mlp)\.shared_experts\.", r"\1.shared_expert."),)
"""The shared experts of a layer are one block, as wide as all of them together."""


def convert(text: Any, *, tied: bool) -> DecoderConfig:
    """See `text.decoder_config`."""
    size, bias = head_dim(text), bool(text.attention_bias)
    attention = attention_shape(text, size, qkv_bias=bias, out_bias=bias)
    blocks = _feed_forward_blocks(text)
    kinds = text.mlp_layer_types
    if kinds is None or len(kinds) != text.num_hidden_layers or not set(kinds) <= set(blocks):
        raise UnsupportedModel(
            f"mlp_layer_types is {kinds}; accepted: 'dense' or 'sparse' for each of the "
            f"{text.num_hidden_layers} layers"
        )
    return decoder_shape(
        text, (LayerConfig(attention, blocks[kind]) for kind in kinds), rotary(text, size), tied=tied
    )


def _feed_forward_blocks(text: Any) -> dict[str, FeedForward]:
    """The feed-forward block of each kind of layer. Raises UnsupportedModel."""
    if text.topk_method != "greedy":
        raise UnsupportedModel(f"topk_method is {text.topk_method!r}; accepted: greedy")
    if text.mlp_bias:
        raise UnsupportedModel("mlp_bias is true; accepted: false")
    count, active = text.n_routed_experts, text.num_experts_per_tok
    if not isinstance(active, int) or not 1 <= active <= count:
        raise UnsupportedModel(f"num_experts_per_tok is {active}; accepted: 1 to n_routed_experts ({count})")
    experts = Experts(
        count=count,
        active=active,
        intermediate=text.moe_intermediate_size,
        activation=text.hidden_act,
        shared=text.moe_intermediate_size * text.n_shared_experts,
        shared_gate=False,
        normalized=False,
        scaling=float(text.routed_scaling_factor),
    )
    return {"dense": Dense(text.intermediate_size, text.hidden_act), "sparse": experts}
