"""Canonical tensor names for the checkpoints of all generations of training code and transformers.

Different generations save the same model under different names: with and without a leading `model.`, the
decoder as `language_model.model` or `text_model`, the tower inside a `vision_model`.
"""

from __future__ import annotations

import re

Rules = tuple[tuple[re.Pattern[str], str], ...]


def _compile(*rules: tuple[str, str]) -> Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rules)


_ROOTS = _compile(
    (r"^(model\.)?(language_model\.)?lm_head\.", "lm_head."),
    (r"^language_model\.output\.", "lm_head."),
    (r"^(model\.)?language_model\.(model\.)?", "decoder."),
    (r"^(model\.)?text_model\.(model\.)?", "decoder."),
    (r"^(model\.)?visual\.", "vision."),
    (r"^(model\.)?vision_tower\.(vision_model\.)?", "vision."),
    (r"^(model\.)?vision_model\.", "vision."),
    (r"^(model\.)?multi_modal_projector\.", "projector."),
    (r"^(model\.)?connector\.modality_projection\.", "projector."),
    (r"^(model\.)?image_newline$", "newline"),
    (r"^model\.(embed_tokens|layers|norm)\.", r"decoder.\1."),
    (r"^mlp1\.0\.", "projector.layer_norm."),
    (r"^mlp1\.1\.", "projector.linear_1."),
    (r"^mlp1\.3\.", "projector.linear_2."),
)
"""Beginnings of names. The first rule that matches is applied."""
_VISION = _compile(
    (r"\.cls_token$", ".class_embedding"),
    (r"\.patch_embeddings\.projection\.", ".patch_embedding."),
    (r"\.position_embeddings?$", ".position_embedding.weight"),
    (r"^vision\.layernorm\.", "vision.post_layernorm."),
    (r"\.encoder\.layer\.", ".encoder.layers."),
    (r"(\.encoder\.layers\.\d+)\.(attention|attn)\.", r"\1.self_attn."),
    (r"(\.encoder\.layers\.\d+\.self_attn)\.(projection_layer|proj)\.", r"\1.out_proj."),
    (r"(\.encoder\.layers\.\d+)\.(layernorm_before|norm1)\.", r"\1.layer_norm1."),
    (r"(\.encoder\.layers\.\d+)\.(layernorm_after|norm2)\.", r"\1.layer_norm2."),
    (r"(\.encoder\.layers\.\d+)\.(lambda_|ls)([12])$", r"\1.layer_scale\3"),
)
"""Names inside the towers of InternVL, in both of its layouts. All rules that match are applied."""
_DECODER = _compile(
    (r"^decoder\.tok_embeddings\.", "decoder.embed_tokens."),
    (r"(\.layers\.\d+)\.attention\.wqkv\.", r"\1.self_attn.wqkv."),
    (r"(\.layers\.\d+)\.attention\.wo\.", r"\1.self_attn.o_proj."),
    (r"(\.layers\.\d+)\.feed_forward\.w1\.", r"\1.mlp.gate_proj."),
    (r"(\.layers\.\d+)\.feed_forward\.w2\.", r"\1.mlp.down_proj."),
    (r"(\.layers\.\d+)\.feed_forward\.w3\.", r"\1.mlp.up_proj."),
    (r"(\.layers\.\d+)\.attention_norm\.", r"\1.input_layernorm."),
    (r"(\.layers\.\d+)\.ffn_norm\.", r"\1.post_attention_layernorm."),
)
"""Names inside the decoder of InternLM2. All rules that match are applied."""

ALWAYS_IGNORED = (r"\.inv_freq$", r"\.position_ids$")
"""Regular expressions of canonical names that no model loads."""


def canonical(name: str) -> str:
    """Return the canonical form of a tensor's name.

    `model.language_model.layers.0.x` and `language_model.model.layers.0.x`, for example, become
    `decoder.layers.0.x`.
    """
    for pattern, replacement in _ROOTS:
        renamed, count = pattern.subn(replacement, name, count=1)
        if count:
            name = renamed
            break
    root = name.partition(".")[0]
    for pattern, replacement in {"vision": _VISION, "decoder": _DECODER}.get(root, ()):
        name = pattern.sub(replacement, name, count=1)
    return name
