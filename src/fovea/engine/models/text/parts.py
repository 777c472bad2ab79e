"""Parts of text configurations that several families share: rotary positions, experts, plain attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import (
    Attention,
    DecoderConfig,
    Dense,
    Experts,
    FeedForward,
    LayerConfig,
    Rotary,
)
from fovea.engine.layers.mixers import mrope_axes

STATIC_ROPE = ("default", "linear", "llama3", "yarn", "dynamic", "proportional")
"""Types of RoPE whose frequencies are the same for all lengths up to `max_position_embeddings`.

"dynamic" is one of them: it changes its frequencies beyond that length only, which no context exceeds here.
"""


def decoder_shape(
    text: Any, layers: Iterable[LayerConfig], *rotaries: Rotary, eps: float | None = None, **rest: Any
) -> DecoderConfig:
    """Return the shape of a decoder. All families have these names in their configurations.

    eps: constant of the norms; None: rms_norm_eps.
    rest: further fields of `DecoderConfig`.
    """
    return DecoderConfig(
        vocab_size=text.vocab_size,
        hidden=text.hidden_size,
        layers=tuple(layers),
        rotaries=rotaries,
        eps=text.rms_norm_eps if eps is None else eps,
        max_positions=text.max_position_embeddings,
        **rest,
    )


def attention_shape(text: Any, size: int, **rest: Any) -> Attention:
    """Return the attention of a layer. size: numbers per head. rest: further fields of `Attention`."""
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    return Attention(**{"heads": heads, "kv_heads": kv_heads, "head_dim": size, "scale": size**-0.5} | rest)


def mrope(text: Any, size: int, default: tuple[int, ...], *, interleaved: bool) -> Rotary:
    """Return rotary positions with three coordinates, whose sections cover all rotated frequencies.

    default: the numbers of `mrope_section` for configurations that omit them.

    Raises UnsupportedModel.
    """
    sections = text.rope_parameters.get("mrope_section") or default
    axes = tuple(mrope_axes(sections, interleaved=interleaved))
    angles = rotary(text, size, axes=axes)
    if len(angles.inverse) != len(axes):
        raise UnsupportedModel(
            f"mrope_section {list(sections)} does not add up to the {len(angles.inverse)} rotary frequencies"
        )
    return angles


def head_dim(text: Any) -> int:
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return size


def rotary(
    text: Any,
    size: int,
    parameters: Any = None,
    axes: tuple[int, ...] | None = None,
    layer_type: str | None = None,
) -> Rotary:
    """Return the rotary positions of a text model.

    size: numbers per head.
    parameters: the configuration's RoPE parameters; None: those of the whole model.
    axes: see `Rotary`.
    layer_type: the configuration's name for the layers, if it has parameters for each kind of layer.

    Raises UnsupportedModel for a type of RoPE whose frequencies change with the length of a sequence.
    """
    parameters = text.rope_parameters if parameters is None else parameters
    kind = parameters.get("rope_type", "default")
    if kind not in STATIC_ROPE:
        raise UnsupportedModel(f"RoPE of type {kind!r} is not supported; supported: {', '.join(STATIC_ROPE)}")
    # The frequencies are computed here even if the model's tensors have no storage (`--check`).
    with torch.device("cpu"):
        if kind not in ("default", "dynamic"):
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            options = {} if layer_type is None else {"layer_type": layer_type}
            inverse, scaling = ROPE_INIT_FUNCTIONS[kind](text, device="cpu", **options)
            return Rotary(tuple(inverse.tolist()), float(scaling), axes)
        rotated = int(size * parameters.get("partial_rotary_factor", 1.0))
        inverse = 1.0 / (
            parameters["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float) / rotated)
        )
        return Rotary(tuple(inverse.tolist()), 1.0, axes)


def feed_forward(text: Any, layer: int, *, bias: bool = False) -> FeedForward:
    """Return the feed-forward block of a layer of Qwen's text models, dense or with experts.

    layer: number of the layer.
    """
    experts = getattr(text, "num_experts", 0)
    dense_layers = getattr(text, "mlp_only_layers", None) or ()
    step = getattr(text, "decoder_sparse_step", 1)
    if not experts or layer in dense_layers or (layer + 1) % step:
        return Dense(text.intermediate_size, text.hidden_act, bias)
    return Experts(
        count=experts,
        active=text.num_experts_per_tok,
        intermediate=text.moe_intermediate_size,
        activation=text.hidden_act,
        shared=getattr(text, "shared_expert_intermediate_size", 0) or 0,
    )
