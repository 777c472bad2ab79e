"""Sizes of decoders and vision towers that several architectures share."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.support.checkpoints.tokens import VOCABULARY

TEXT_LAYERS = 3
"""Number of layers of a decoder. Tests of slow kernels lower it."""
CLIP_NORM = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF_NORM = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def decoder(**extra: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64, "intermediate_size": 112,
        "num_hidden_layers": TEXT_LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
        "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, **extra,
    }  # fmt: skip


def llama() -> Any:
    return hf.LlamaConfig(**decoder())


def qwen_tower(**extra: Any) -> dict[str, Any]:
    return {
        "depth": 3,
        "num_heads": 4,
        "in_channels": 3,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **extra,
    }


EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
}  # fmt: skip


def hybrid_decoder(**extra: Any) -> dict[str, Any]:
    """Text configuration of Qwen3.5: two layers of Gated DeltaNet, then one of attention."""
    return decoder(
        head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=24, linear_conv_kernel_dim=4,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2], "mrope_interleaved": True,
        },
        **extra,
    )  # fmt: skip


def clip_tower() -> Any:
    return hf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
    )


def siglip_tower() -> dict[str, Any]:
    return {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "image_size": 64, "patch_size": 8,
    }  # fmt: skip


def qwen_processor(patch: int) -> dict[str, Any]:
    unit = patch * 2
    return {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "merge_size": 2,
        "temporal_patch_size": 2, "min_pixels": 4 * unit**2, "max_pixels": 64 * unit**2, **CLIP_NORM,
    }  # fmt: skip
