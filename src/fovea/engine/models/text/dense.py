"""The Llama, Mistral, Qwen2 and Qwen3 families: every layer attends to all tokens, or to a window of them."""

from __future__ import annotations

from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import Attention, DecoderConfig, LayerConfig
from fovea.engine.layers.rope import mrope_axes
from fovea.engine.models.text.parts import feed_forward, head_dim, rotary

KINDS = {
    # model_type of the text configuration: (bias of q, k, v; norm of q and k; M-RoPE layout).
    # A bias of None is the configuration's attention_bias, or use_bias, which is for all linear maps.
    "llama": (None, False, None),
    "qwen2": (True, False, None),
    "qwen3": (None, True, None),
    "qwen2_vl_text": (True, False, "runs"),
    "qwen2_5_vl_text": (True, False, "runs"),
    "qwen3_vl_text": (None, True, "interleaved"),
    "qwen3_vl_moe_text": (None, True, "interleaved"),
    "mistral": (False, False, None),
    "ministral3": (False, False, None),
    "paddleocr_vl_text": (None, False, "runs"),
}
DEFAULT_SECTIONS = {"paddleocr_vl_text": (16, 24, 24)}
"""The numbers of `mrope_section` for configurations that omit them, by their model_type."""
MISTRAL = ("mistral", "ministral3")
"""Families in which all layers have a sliding window if `sliding_window` is set."""


def convert(text: Any, *, tied: bool) -> DecoderConfig:
    """See `registry.decoder_config`."""
    qkv_bias, qk_norm, mrope = KINDS[text.model_type]
    use_bias = bool(getattr(text, "use_bias", False))
    attention_bias = use_bias or bool(getattr(text, "attention_bias", False))
    size = head_dim(text)
    attention = Attention(
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=size,
        scale=size**-0.5,
        qkv_bias=attention_bias if qkv_bias is None else qkv_bias,
        out_bias=attention_bias if qkv_bias is None else False,
        qk_norm=qk_norm,
    )
    _check_windows(text)
    mlp_bias = use_bias or bool(getattr(text, "mlp_bias", False))
    layers = tuple(
        LayerConfig(attention, feed_forward(text, n, bias=mlp_bias)) for n in range(text.num_hidden_layers)
    )
    return DecoderConfig(
        vocab_size=text.vocab_size,
        hidden=text.hidden_size,
        layers=layers,
        rotaries=(rotary(text, size, axes=_axes(text, size, mrope)),),
        eps=text.rms_norm_eps,
        tied=tied,
        max_positions=text.max_position_embeddings,
        query_scaling=_query_scaling(text),
    )


def _query_scaling(text: Any) -> tuple[float, int] | None:
    """See `DecoderConfig.query_scaling`."""
    beta = text.rope_parameters.get("llama_4_scaling_beta")
    if text.model_type != "ministral3" or not beta:
        return None
    return float(beta), int(text.rope_parameters["original_max_position_embeddings"])


def _check_windows(text: Any) -> None:
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    windowed = text.model_type in MISTRAL and getattr(text, "sliding_window", None) is not None
    if kinds != {"full_attention"} or windowed:
        raise UnsupportedModel(f"{text.model_type} with {sorted(kinds)}: only full attention is supported")


def _axes(text: Any, size: int, layout: str | None) -> tuple[int, ...] | None:
    """The coordinate of each frequency. layout: how M-RoPE divides them; None: positions are plain."""
    if layout is None:
        return None
    sections = text.rope_parameters.get("mrope_section", DEFAULT_SECTIONS.get(text.model_type))
    if sections is None or sum(sections) != size // 2:
        raise UnsupportedModel(f"mrope_section {sections} does not add up to half the head size {size}")
    return tuple(mrope_axes(sections, interleaved=layout == "interleaved"))
