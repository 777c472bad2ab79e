"""Gemma 4: heads of two sizes, layers that read keys and values of others, and per-layer embeddings.

Layers with a sliding window have heads of one size, layers without one have larger heads. The last layers of
small models have no keys and values of their own. Mixtures of experts have a dense block beside them.
"""

from __future__ import annotations

from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import (
    Attention,
    DecoderConfig,
    Dense,
    Experts,
    FeedForward,
    LayerConfig,
    PerLayer,
    Rotary,
)
from fovea.engine.models.text.parts import decoder_shape, rotary

KINDS = ("full_attention", "sliding_attention")
_LAYER = r"^(decoder\.layers\.\d+)\."
RENAMES = (
    (r"^decoder\.embed_tokens_per_layer\.", "decoder.per_layer.table."),
    (r"^decoder\.per_layer_model_projection\.", "decoder.per_layer.projection."),
    (r"^decoder\.per_layer_projection_norm\.", "decoder.per_layer.norm."),
    (_LAYER + r"per_layer_input_gate\.", r"\1.per_layer.gate."),
    (_LAYER + r"per_layer_projection\.", r"\1.per_layer.projection."),
    (_LAYER + r"post_per_layer_input_norm\.", r"\1.per_layer.norm."),
)
EXPERT_RENAMES = (
    (_LAYER + r"mlp\.", r"\1.mlp.dense."),
    (_LAYER + r"(router|experts)\.", r"\1.mlp.\2."),
    (_LAYER + r"pre_feedforward_layernorm\.", r"\1.mlp.dense_norm."),
    (_LAYER + r"post_feedforward_layernorm_1\.", r"\1.mlp.dense_output_norm."),
    (_LAYER + r"pre_feedforward_layernorm_2\.", r"\1.mlp.experts_norm."),
    (_LAYER + r"post_feedforward_layernorm_2\.", r"\1.mlp.experts_output_norm."),
)
"""Further renames of models with experts."""


def unused(text: Any) -> tuple[str, ...]:
    """Regular expressions of canonical names of tensors that checkpoints hold and no layer reads.

    Layers that read keys and values of others have maps for keys and values of their own in some checkpoints.
    """
    first = text.num_hidden_layers - text.num_kv_shared_layers
    layers = "|".join(str(number) for number in range(first, text.num_hidden_layers))
    return (rf"^decoder\.layers\.({layers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.",) if layers else ()


def convert(text: Any, *, tied: bool) -> DecoderConfig:
    """See `text.decoder_config`."""
    unknown = sorted(set(text.layer_types) - set(KINDS))
    if unknown:
        raise UnsupportedModel(f"gemma4 with layers of type {unknown}; supported: {', '.join(KINDS)}")
    if text.use_bidirectional_attention not in (None, "vision"):
        raise UnsupportedModel(
            f"use_bidirectional_attention is {text.use_bidirectional_attention!r}; supported: null, 'vision'"
        )
    sources = _sources(text)
    return decoder_shape(
        text,
        (_layer(text, number, sources[number]) for number in range(text.num_hidden_layers)),
        *(_rotary(text, kind) for kind in KINDS),
        tied=tied,
        embedding_scale=float(text.hidden_size) ** 0.5,
        logit_cap=text.final_logit_softcapping or 0.0,
        per_layer=_per_layer(text),
    )


def _rotary(text: Any, kind: str) -> Rotary:
    """The rotary positions of the layers of one kind; those of the other if there are none of this kind."""
    kind = kind if kind in text.layer_types else text.layer_types[0]
    own = text.per_layer_config[kind]
    return rotary(own, own.head_dim, text.rope_parameters[kind], layer_type=kind)


def _layer(text: Any, number: int, source: int | None) -> LayerConfig:
    kind, own = text.layer_types[number], text.per_layer_config[number]
    windowed = kind == "sliding_attention"
    attention = Attention(
        heads=own.num_attention_heads,
        kv_heads=own.num_key_value_heads,
        head_dim=own.head_dim,
        scale=1.0,
        qkv_bias=bool(text.attention_bias),
        out_bias=bool(text.attention_bias),
        qk_norm=True,
        rotary=KINDS.index(kind),
        window=text.sliding_window if windowed else None,
        causal=not windowed,
        value_norm=True,
        shared_values=bool(text.attention_k_eq_v) and not windowed,
        source=source,
    )
    width = text.intermediate_size * (2 if text.use_double_wide_mlp and source is not None else 1)
    return LayerConfig(attention, _feed_forward(text, width), sandwich=True, scaled=True)


def _feed_forward(text: Any, width: int) -> FeedForward:
    if not text.enable_moe_block:
        return Dense(width, text.hidden_activation)
    return Experts(
        count=text.num_experts,
        active=text.top_k_experts,
        intermediate=text.moe_intermediate_size,
        activation=text.hidden_activation,
        dense=width,
    )


def _sources(text: Any) -> list[int | None]:
    """For each layer, the layer whose keys and values it reads; None: it has its own."""
    own = text.num_hidden_layers - text.num_kv_shared_layers
    last = {kind: number for number, kind in enumerate(text.layer_types[:own])}
    missing = sorted(set(text.layer_types[own:]) - set(last))
    if missing:
        raise UnsupportedModel(
            f"num_kv_shared_layers is {text.num_kv_shared_layers}: no layer of type {missing} is left "
            "that has keys and values"
        )
    return [None] * own + [last[kind] for kind in text.layer_types[own:]]


def _per_layer(text: Any) -> PerLayer | None:
    if not text.hidden_size_per_layer_input:
        return None
    return PerLayer(
        text.hidden_size_per_layer_input,
        text.vocab_size_per_layer_input,
        text.pad_token_id or 0,
        text.hidden_activation,
    )
