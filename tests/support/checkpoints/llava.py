"""Tiny models of the LLaVA family."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.support.checkpoints.parts import CLIP_NORM, clip_tower, decoder, llama


def llava(ids: dict[str, int]) -> Any:
    config = hf.LlavaConfig(vision_config=clip_tower(), text_config=llama(), **ids)
    return hf.LlavaForConditionalGeneration(config)


PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]


def llava_next(ids: dict[str, int]) -> Any:
    config = hf.LlavaNextConfig(
        vision_config=clip_tower(), text_config=llama(), image_grid_pinpoints=PINPOINTS, **ids
    )
    return hf.LlavaNextForConditionalGeneration(config)


ONEVISION_PINPOINTS = [[56 * row, 56 * column] for row in range(1, 5) for column in range(1, 5)]


def llava_onevision(ids: dict[str, int]) -> Any:
    vision = hf.SiglipVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=56,
        patch_size=14, vision_use_head=False,
    )  # fmt: skip
    config = hf.LlavaOnevisionConfig(
        vision_config=vision, text_config=hf.Qwen2Config(**decoder()),
        image_grid_pinpoints=ONEVISION_PINPOINTS, vision_aspect_ratio="anyres_max_4", **ids,
    )  # fmt: skip
    return hf.LlavaOnevisionForConditionalGeneration(config)


CLIP_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56},
    "crop_size": {"height": 56, "width": 56}, **CLIP_NORM,
}  # fmt: skip
NEXT_PROCESSOR = {
    **CLIP_PROCESSOR, "image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": PINPOINTS,
}  # fmt: skip
ONEVISION_PROCESSOR = {
    "image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 56, "width": 56},
    "image_grid_pinpoints": ONEVISION_PINPOINTS, **CLIP_NORM,
}  # fmt: skip
