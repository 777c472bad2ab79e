"""The decoder of GLM-4.1V (arXiv 2507.01006), which is GLM-4's with M-RoPE.

There are norms before and after attention and MLP. Some numbers of each head are rotated, in neighbouring
pairs.
"""

from __future__ import annotations

from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import DecoderConfig, Dense, LayerConfig
from fovea.engine.models.text import Renames
from fovea.engine.models.text.parts import attention_shape, decoder_shape, mrope

# In GLM, post_attention_layernorm is the norm before the MLP. It is renamed first, so that the norm after
# attention can get its name.
RENAMES: Renames = (
    (r"^(decoder\.layers\.\d+)\.post_attention_layernorm\.", r"\1.pre_feedforward_layernorm."),
    (r"^(decoder\.layers\.\d+)\.post_self_attn_layernorm\.", r"\1.post_attention_layernorm."),
    (r"^(decoder\.layers\.\d+)\.post_mlp_layernorm\.", r"\1.post_feedforward_layernorm."),
)
SECTIONS = (8, 12, 12)
"""The numbers of `mrope_section` for configurations that omit them."""


def convert(text: Any, *, tied: bool) -> DecoderConfig:
    """See `text.decoder_config`."""
    size = text.hidden_size // text.num_attention_heads
    angles = mrope(text, size, SECTIONS, interleaved=False)
    rotated = 2 * len(angles.inverse)
    if size % rotated:
        raise UnsupportedModel(
            f"{rotated} of {size} numbers of a head are rotated; supported: a divisor of {size}"
        )
    attention = attention_shape(text, size, qkv_bias=True, pairs=True)
    layer = LayerConfig(attention, Dense(text.intermediate_size, text.hidden_act), sandwich=True)
    return decoder_shape(text, (layer,) * text.num_hidden_layers, angles, tied=tied)
