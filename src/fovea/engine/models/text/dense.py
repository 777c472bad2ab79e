"""The Llama, Mistral, Qwen2 and Qwen3 families: every layer attends to all tokens, or to a window of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import DecoderConfig, LayerConfig
from fovea.engine.layers.mixers import mrope_axes
from fovea.engine.models.text.parts import attention_shape, decoder_shape, feed_forward, head_dim, rotary

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
FULL, SLIDING = "full_attention", "sliding_attention"
"""Names of layers without and with a window in configurations."""
DEFAULT_SECTIONS = {"paddleocr_vl_text": (16, 24, 24)}
"""The numbers of `mrope_section` for configurations that omit them, by their model_type."""
MISTRAL = ("mistral", "ministral3")
"""Families in which all layers have a sliding window if `sliding_window` is set."""
QWEN = ("qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text")
"""Families in which some layers can have a window: `layer_types`, or those from `max_window_layers` on.

They have none unless `use_sliding_window` is set.
"""


def convert(text: Any, *, tied: bool) -> DecoderConfig:
    """See `text.decoder_config`."""
    qkv_bias, qk_norm, mrope = KINDS[text.model_type]
    use_bias = bool(getattr(text, "use_bias", False))
    attention_bias = use_bias or bool(getattr(text, "attention_bias", False))
    size = head_dim(text)
    attention = attention_shape(
        text,
        size,
        qkv_bias=attention_bias if qkv_bias is None else qkv_bias,
        out_bias=attention_bias if qkv_bias is None else False,
        qk_norm=qk_norm,
    )
    mlp_bias = use_bias or bool(getattr(text, "mlp_bias", False))
    layers = tuple(
        LayerConfig(replace(attention, window=window), feed_forward(text, n, bias=mlp_bias))
        for n, window in enumerate(_windows(text))
    )
    return decoder_shape(
        text,
        layers,
        rotary(text, size, axes=_axes(text, size, mrope)),
        tied=tied,
        query_scaling=_query_scaling(text),
    )


def _query_scaling(text: Any) -> tuple[float, int] | None:
    """See `DecoderConfig.query_scaling`."""
    beta = text.rope_parameters.get("llama_4_scaling_beta")
    if text.model_type != "ministral3" or not beta:
        return None
    return float(beta), int(text.rope_parameters["original_max_position_embeddings"])


def _windows(text: Any) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in tokens; None: the layer has none.

    Raises UnsupportedModel for kinds of layers that the family does not have.
    """
    count: int = text.num_hidden_layers
    window: int | None = getattr(text, "sliding_window", None)
    default = SLIDING if text.model_type in MISTRAL and window is not None else FULL
    kinds = tuple(getattr(text, "layer_types", None) or [default] * count)
    accepted = {FULL, SLIDING} if text.model_type in QWEN and window is not None else {default}
    if len(kinds) != count or not set(kinds) <= accepted:
        raise UnsupportedModel(
            f"layer_types of {text.model_type}: {len(kinds)} layers of {', '.join(sorted(set(kinds)))}, with "
            f"sliding_window {window}; supported: {count} layers of {' or '.join(sorted(accepted))}"
        )
    if SLIDING not in kinds:
        return (None,) * count
    if not isinstance(window, int) or window < 1:
        raise UnsupportedModel(f"sliding_window is {window!r}; supported: an integer of 1 or more")
    # A window as long as the longest sequence hides nothing.
    seen = None if window >= text.max_position_embeddings else window
    return tuple(seen if kind == SLIDING else None for kind in kinds)


def _axes(text: Any, size: int, layout: str | None) -> tuple[int, ...] | None:
    """The coordinate of each frequency. layout: how M-RoPE assigns them; None: plain positions."""
    if layout is None:
        return None
    sections = text.rope_parameters.get("mrope_section", DEFAULT_SECTIONS.get(text.model_type))
    if sections is None or sum(sections) != size // 2:
        raise UnsupportedModel(f"mrope_section {sections} does not add up to half the head size {size}")
    return tuple(mrope_axes(sections, interleaved=layout == "interleaved"))
