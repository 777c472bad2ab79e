"""Tiny models made for reading documents."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.support.checkpoints import parts
from tests.support.checkpoints.parts import HALF_NORM, decoder, qwen_processor, siglip_tower


def deepseek_ocr2(ids: dict[str, int]) -> Any:
    # The numbers of queries are those of the class, so a view has 64 x 64 patches; they are small instead.
    sam = {
        "hidden_size": 16, "output_channels": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "image_size": 128, "patch_size": 2, "window_size": 14, "global_attn_indexes": [1], "mlp_ratio": 2.0,
        "downsample_channels": [24, 32],
    }  # fmt: skip
    encoder = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    text = decoder(
        n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=2, n_group=1,
        topk_group=1, routed_scaling_factor=1.5,
        mlp_layer_types=["dense", *["sparse"] * (parts.TEXT_LAYERS - 1)],
    )  # fmt: skip
    config = hf.DeepseekOcr2Config(
        vision_config={"sam_config": sam, "encoder_config": encoder}, text_config=text, **ids
    )
    return hf.DeepseekOcr2ForConditionalGeneration(config)


def paddleocr_vl(ids: dict[str, int]) -> Any:
    config = hf.PaddleOCRVLConfig(
        vision_config={**siglip_tower(), "image_size": 98, "patch_size": 14, "num_channels": 3},
        text_config=decoder(
            head_dim=16,
            use_bias=True,
            tie_word_embeddings=False,
            rope_scaling={"type": "default", "mrope_section": [2, 3, 3]},
        ),
        tie_word_embeddings=False,
        **ids,
    )
    return hf.PaddleOCRVLForConditionalGeneration(config)


DEEPSEEK_PROCESSOR = {
    "image_processor_type": "DeepseekOcr2ImageProcessor", "size": {"height": 128, "width": 128},
    "tile_size": 96, "max_patches": 3, **HALF_NORM,
}  # fmt: skip
PADDLEOCR_PROCESSOR = {
    **qwen_processor(14), "image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1,
    **HALF_NORM,
}  # fmt: skip
