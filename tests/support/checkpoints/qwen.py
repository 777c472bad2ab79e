"""Tiny models of the Qwen family."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.support.checkpoints.parts import CLIP_NORM, EXPERTS, HALF_NORM, decoder, hybrid_decoder, qwen_tower


def qwen2_vl(ids: dict[str, int]) -> Any:
    config = hf.Qwen2VLConfig(
        vision_config=qwen_tower(embed_dim=32, hidden_size=64, mlp_ratio=2, patch_size=14),
        text_config=decoder(rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}),
        **ids,
    )
    return hf.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl(ids: dict[str, int]) -> Any:
    config = hf.Qwen2_5_VLConfig(
        vision_config=qwen_tower(
            hidden_size=32, intermediate_size=48, out_hidden_size=64, patch_size=14, window_size=112,
            fullatt_block_indexes=[1],
        ),
        text_config=decoder(rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}),
        **ids,
    )  # fmt: skip
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(ids: dict[str, int]) -> Any:
    config = hf.Qwen3VLConfig(
        vision_config=qwen_tower(
            hidden_size=32, intermediate_size=48, out_hidden_size=64, patch_size=16,
            num_position_embeddings=64, deepstack_visual_indexes=[0, 2],
        ),
        text_config=decoder(head_dim=16, rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2]}),
        **ids,
    )  # fmt: skip
    return hf.Qwen3VLForConditionalGeneration(config)


def qwen3_tower() -> dict[str, Any]:
    return qwen_tower(
        hidden_size=32, intermediate_size=48, out_hidden_size=64, patch_size=16, num_position_embeddings=64
    )


def qwen3_vl_moe(ids: dict[str, int]) -> Any:
    config = hf.Qwen3VLMoeConfig(
        vision_config={**qwen3_tower(), "deepstack_visual_indexes": [0, 2]},
        text_config=decoder(
            head_dim=16, rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2]}, **EXPERTS
        ),
        **ids,
    )
    return hf.Qwen3VLMoeForConditionalGeneration(config)


def qwen3_5(ids: dict[str, int]) -> Any:
    config = hf.Qwen3_5Config(vision_config=qwen3_tower(), text_config=hybrid_decoder(), **ids)
    return hf.Qwen3_5ForConditionalGeneration(config)


def qwen3_5_moe(ids: dict[str, int]) -> Any:
    text = hybrid_decoder(**EXPERTS, shared_expert_intermediate_size=32)
    config = hf.Qwen3_5MoeConfig(vision_config=qwen3_tower(), text_config=text, **ids)
    return hf.Qwen3_5MoeForConditionalGeneration(config)


def video_processor(architecture: str) -> dict[str, Any]:
    """The video processor's settings: as in real checkpoints of the architecture, but with small limits."""
    newest = architecture.startswith("qwen3")
    unit = 32 if newest else 28
    norm = HALF_NORM if newest else CLIP_NORM
    return {
        "video_processor_type": "Qwen3VLVideoProcessor" if newest else "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 4 * unit**2, "longest_edge": (256 if newest else 24) * unit**2},
        "patch_size": unit // 2, "merge_size": 2, "temporal_patch_size": 2, "fps": 2, "min_frames": 4,
        "max_frames": 32, **norm,
    }  # fmt: skip
