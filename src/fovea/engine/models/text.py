"""Converts text configurations of transformers to `DecoderConfig`."""

from __future__ import annotations

from typing import Any

import torch

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.decoder import DecoderConfig
from fovea.engine.layers.rope import mrope_axes

STATIC_ROPE = ("default", "linear", "llama3", "yarn", "dynamic")
"""Types of RoPE whose frequencies are the same for all lengths up to `max_position_embeddings`.

"dynamic" is one of them: it changes its frequencies beyond that length only, which no context exceeds here.
"""
FAMILIES = {
    # model_type of the text configuration: (bias of q, k, v; norm of q and k; M-RoPE layout).
    # A bias of None is the configuration's attention_bias.
    "llama": (None, False, None),
    "qwen2": (True, False, None),
    "qwen3": (None, True, None),
    "qwen2_vl_text": (True, False, "runs"),
    "qwen2_5_vl_text": (True, False, "runs"),
    "qwen3_vl_text": (None, True, "interleaved"),
    "mistral": (False, False, None),
}


def decoder_config(text: Any, *, tied: bool) -> DecoderConfig:
    """Return the shape of the decoder for a text configuration.

    tied: the embedding table is the language head as well.

    Raises UnsupportedModel for features that this decoder does not compute.
    """
    family = FAMILIES.get(text.model_type)
    if family is None:
        raise UnsupportedModel(
            f"text model {text.model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (
        text.model_type == "mistral" and getattr(text, "sliding_window", None) is not None
    ):
        raise UnsupportedModel(f"{text.model_type} with {sorted(kinds)}: only full attention is supported")
    qkv_bias, qk_norm, mrope = family
    attention_bias = bool(getattr(text, "attention_bias", False))
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    inverse, scaling = _rope(text, head_dim)
    axes = None
    if mrope is not None:
        sections = text.rope_parameters.get("mrope_section")
        if sections is None or sum(sections) != head_dim // 2:
            raise UnsupportedModel(
                f"mrope_section {sections} does not add up to half the head size {head_dim}"
            )
        axes = tuple(mrope_axes(sections, interleaved=mrope == "interleaved"))
    return DecoderConfig(
        vocab_size=text.vocab_size,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=head_dim,
        intermediate=text.intermediate_size,
        eps=text.rms_norm_eps,
        activation=text.hidden_act,
        qkv_bias=attention_bias if qkv_bias is None else qkv_bias,
        out_bias=attention_bias if qkv_bias is None else False,
        mlp_bias=bool(getattr(text, "mlp_bias", False)),
        qk_norm=qk_norm,
        tied=tied,
        max_positions=text.max_position_embeddings,
        rope_inverse=tuple(inverse.tolist()),
        rope_scaling=scaling,
        mrope_axes=axes,
    )


def _rope(text: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    parameters = text.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in STATIC_ROPE or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"RoPE of type {kind!r} is not supported; supported: {', '.join(STATIC_ROPE)}")
    if kind in ("default", "dynamic"):
        base = parameters["rope_theta"]
        return 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse, scaling = ROPE_INIT_FUNCTIONS[kind](text, device="cpu")
    return inverse, float(scaling)
