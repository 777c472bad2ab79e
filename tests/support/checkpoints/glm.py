"""Tiny models of the GLM-V family."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.support.checkpoints.parts import CLIP_NORM, decoder, qwen_tower


def _glm_parts() -> dict[str, Any]:
    """Configurations of both parts. Half of each head is rotated."""
    return {
        "vision_config": qwen_tower(
            hidden_size=32, intermediate_size=48, out_hidden_size=64, patch_size=14, image_size=56
        ),
        "text_config": decoder(
            rope_parameters={
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                "mrope_section": [1, 2, 1],
            },
        ),
    }  # fmt: skip


def glm4v(ids: dict[str, int]) -> Any:
    return hf.Glm4vForConditionalGeneration(hf.Glm4vConfig(**_glm_parts(), **ids))


def glm46v(ids: dict[str, int]) -> Any:
    return hf.Glm46VForConditionalGeneration(hf.Glm46VConfig(**_glm_parts(), **ids))


GLM_PROCESSOR = {
    "image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "merge_size": 2,
    "temporal_patch_size": 2, "size": {"shortest_edge": 2 * 4 * 28**2, "longest_edge": 2 * 64 * 28**2},
    **CLIP_NORM,
}  # fmt: skip
GLM46_PROCESSOR = {**GLM_PROCESSOR, "image_processor_type": "Glm46VImageProcessor"}
