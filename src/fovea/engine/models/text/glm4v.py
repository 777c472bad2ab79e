"""The decoder of GLM-4.1V (arXiv 2507.01006), which is GLM-4's with M-RoPE.

Norms stand on both sides of attention and MLP. Some numbers of each head are rotated, in neighbouring pairs.
"""

from __future__ import annotations

from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import Attention, DecoderConfig, Dense, LayerConfig
from fovea.engine.layers.mixers import mrope_axes
from fovea.engine.models.text import Renames
from fovea.engine.models.text.parts import rotary

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
    sections = text.rope_parameters.get("mrope_section") or SECTIONS
    axes = tuple(mrope_axes(sections, interleaved=False))
    angles = rotary(text, size, axes=axes)
    if len(angles.inverse) != len(axes):
        raise UnsupportedModel(
            f"mrope_section {list(sections)} does not add up to the {len(angles.inverse)} rotary frequencies"
        )
    if size % (2 * len(axes)):
        raise UnsupportedModel(
            f"{2 * len(axes)} of {size} numbers of a head are rotated; supported: a divisor of {size}"
        )
    attention = Attention(
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=size,
        scale=size**-0.5,
        qkv_bias=True,
        pairs=True,
    )
    layer = LayerConfig(attention, Dense(text.intermediate_size, text.hidden_act), sandwich=True)
    return DecoderConfig(
        vocab_size=text.vocab_size,
        hidden=text.hidden_size,
        layers=(layer,) * text.num_hidden_layers,
        rotaries=(angles,),
        eps=text.rms_norm_eps,
        tied=tied,
        max_positions=text.max_position_embeddings,
    )
