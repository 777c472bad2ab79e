"""Canonical tensor names for the checkpoints of all generations of training code and transformers.

Different generations save the same model under different names: with and without a leading `model.`, the
decoder as `language_model.model` or `text_model`, the tower inside a `vision_model`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(model\.)?(language_model\.)?lm_head\.", "lm_head."),
        (r"^language_model\.output\.", "lm_head."),
        (r"^(model\.)?language_model\.(model\.)?", "decoder."),
        (r"^(model\.)?text_model\.(model\.)?", "decoder."),
        (r"^(model\.)?visual\.(vision_model\.)?", "vision."),
        (r"^(model\.)?vision_tower\.(vision_model\.)?", "vision."),
        (r"^(model\.)?vision_model\.", "vision."),
        (r"^(model\.)?vision_encoder\.", "vision."),
        (r"^(model\.)?multi_modal_projector\.", "projector."),
        (r"^(model\.)?vision_projection\.", "projector."),
        (r"^(model\.)?connector\.modality_projection\.", "projector."),
        (r"^(model\.projector|mlp_AR)\.", "projector."),
        (r"^mlp1\.0\.", "projector.layer_norm."),
        (r"^mlp1\.1\.", "projector.linear_1."),
        (r"^mlp1\.3\.", "projector.linear_2."),
        (r"^(model\.)?embed_vision\.", "projector."),
        (r"^(model\.)?image_newline$", "newline"),
        (r"^model\.(embed_tokens|layers|norm)\.", r"decoder.\1."),
    )
)

ALWAYS_IGNORED = (r"\.inv_freq$", r"\.position_ids$")
"""Regular expressions of canonical names that no model loads."""


def canonical(name: str, renames: Iterable[tuple[re.Pattern[str], str]] = ()) -> str:
    """Return the canonical form of a tensor's name.

    `model.language_model.layers.0.x` and `language_model.model.layers.0.x`, for example, become
    `decoder.layers.0.x`.

    renames: a model's own rules. All that match are applied, in order, to the name after the common rules.
    """
    for pattern, replacement in _RULES:
        renamed, count = pattern.subn(replacement, name, count=1)
        if count:
            name = renamed
            break
    for pattern, replacement in renames:
        name = pattern.sub(replacement, name)
    return name
