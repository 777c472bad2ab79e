"""The decoder of Llama 3.2 Vision: Llama's, with layers in between that attend to image states."""

from __future__ import annotations

from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import Attention, CrossAttention, DecoderConfig, Dense, LayerConfig
from fovea.engine.models.text.parts import decoder_shape, head_dim, rotary

EXTRA_EMBEDDINGS = 8
"""Rows of the embedding table after those of the vocabulary, the image token's among them."""


def convert(text: Any, *, tied: bool) -> DecoderConfig:
    """See `text.decoder_config`."""
    cross = set(text.cross_attention_layers)
    if not cross or not cross < set(range(text.num_hidden_layers)):
        raise UnsupportedModel(
            f"cross_attention_layers {sorted(cross)}; accepted: some, not all, of 0 to "
            f"{text.num_hidden_layers - 1}"
        )
    size = head_dim(text)
    heads = {
        "heads": text.num_attention_heads,
        "kv_heads": text.num_key_value_heads,
        "head_dim": size,
        "scale": size**-0.5,
    }
    block = Dense(text.intermediate_size, text.hidden_act)
    return decoder_shape(
        text,
        (
            LayerConfig(CrossAttention(**heads) if number in cross else Attention(**heads), block)
            for number in range(text.num_hidden_layers)
        ),
        rotary(text, size),
        tied=tied,
        extra_embeddings=EXTRA_EMBEDDINGS,
    )
