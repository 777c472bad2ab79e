"""Tiny models with a tower of Pixtral."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.support.checkpoints.parts import CLIP_NORM, decoder


def pixtral_tower() -> dict[str, Any]:
    return {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "head_dim": 8, "image_size": 196, "patch_size": 14, "hidden_act": "silu",
    }  # fmt: skip


def mistral() -> Any:
    return hf.MistralConfig(**decoder(head_dim=16, sliding_window=None))


def pixtral(ids: dict[str, int]) -> Any:
    config = hf.LlavaConfig(
        vision_config=pixtral_tower(), text_config=mistral(), vision_feature_layer=-1,
        vision_feature_select_strategy="full", **ids,
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config)


def mistral3(ids: dict[str, int]) -> Any:
    config = hf.Mistral3Config(
        vision_config=pixtral_tower(), text_config=mistral(), spatial_merge_size=2,
        tie_word_embeddings=False, **ids,
    )  # fmt: skip
    return hf.Mistral3ForConditionalGeneration(config)


def lighton_ocr(ids: dict[str, int]) -> Any:
    config = hf.LightOnOcrConfig(
        vision_config=pixtral_tower(), text_config=hf.Qwen3Config(**decoder(head_dim=16)),
        spatial_merge_size=2, **ids,
    )  # fmt: skip
    return hf.LightOnOcrForConditionalGeneration(config)


PIXTRAL_PROCESSOR = {
    "image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 14, "width": 14},
    "size": {"longest_edge": 196}, **CLIP_NORM,
}  # fmt: skip
