"""The supported architectures: builder of the model, image processor and marker of an image of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.checkpoints.gemma import GEMMA3_PROCESSOR, GEMMA4_PROCESSOR, gemma3, gemma4
from tests.support.checkpoints.glm import GLM46_PROCESSOR, GLM_PROCESSOR, glm4v, glm46v
from tests.support.checkpoints.llava import (
    CLIP_PROCESSOR,
    NEXT_PROCESSOR,
    ONEVISION_PROCESSOR,
    llava,
    llava_next,
    llava_onevision,
)
from tests.support.checkpoints.ocr import DEEPSEEK_PROCESSOR, PADDLEOCR_PROCESSOR, deepseek_ocr2, paddleocr_vl
from tests.support.checkpoints.parts import qwen_processor
from tests.support.checkpoints.pixtral import PIXTRAL_PROCESSOR, lighton_ocr, mistral3, pixtral
from tests.support.checkpoints.qwen import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_5_moe, qwen3_vl, qwen3_vl_moe
from tests.support.checkpoints.tiled import (
    IDEFICS_PROCESSOR,
    INTERNVL_PROCESSOR,
    LFM2_PROCESSOR,
    MINICPM_PROCESSOR,
    MLLAMA_PROCESSOR,
    SMOL_PROCESSOR,
    idefics3,
    internvl,
    lfm2_vl,
    minicpmv4_6,
    mllama,
    smolvlm,
)

Builder = Callable[[dict[str, int]], Any]
ARCHITECTURES: dict[str, tuple[Builder, dict[str, Any], str]] = {
    "qwen3_vl": (qwen3_vl, qwen_processor(16), "<|image_pad|>"),
    "qwen3_5": (qwen3_5, qwen_processor(16), "<|image_pad|>"),
    "qwen3_5_moe": (qwen3_5_moe, qwen_processor(16), "<|image_pad|>"),
    "qwen3_vl_moe": (qwen3_vl_moe, qwen_processor(16), "<|image_pad|>"),
    "qwen2_5_vl": (qwen2_5_vl, qwen_processor(14), "<|image_pad|>"),
    "qwen2_vl": (qwen2_vl, qwen_processor(14), "<|image_pad|>"),
    "llava": (llava, CLIP_PROCESSOR, "<image>"),
    "llava_next": (llava_next, NEXT_PROCESSOR, "<image>"),
    "llava_onevision": (llava_onevision, ONEVISION_PROCESSOR, "<image>"),
    "idefics3": (idefics3, IDEFICS_PROCESSOR, "<image>"),
    "smolvlm": (smolvlm, SMOL_PROCESSOR, "<image>"),
    "gemma3": (gemma3, GEMMA3_PROCESSOR, "<image_soft_token>"),
    "gemma4": (gemma4, GEMMA4_PROCESSOR, "<|image|>"),
    "lfm2_vl": (lfm2_vl, LFM2_PROCESSOR, "<image>"),
    "pixtral": (pixtral, PIXTRAL_PROCESSOR, "[IMG]"),
    "mistral3": (mistral3, PIXTRAL_PROCESSOR, "[IMG]"),
    "lighton_ocr": (lighton_ocr, PIXTRAL_PROCESSOR, "<|image_pad|>"),
    "paddleocr_vl": (paddleocr_vl, PADDLEOCR_PROCESSOR, "<|IMAGE_PLACEHOLDER|>"),
    "glm4v": (glm4v, GLM_PROCESSOR, "<|image|>"),
    "glm46v": (glm46v, GLM46_PROCESSOR, "<|image|>"),
    "internvl": (internvl, INTERNVL_PROCESSOR, "<IMG_CONTEXT>"),
    "internvl_chat": (internvl, INTERNVL_PROCESSOR, "<IMG_CONTEXT>"),
    "minicpmv4_6": (minicpmv4_6, MINICPM_PROCESSOR, "<|image_pad|>"),
    "deepseek_ocr2": (deepseek_ocr2, DEEPSEEK_PROCESSOR, "<image>"),
    "mllama": (mllama, MLLAMA_PROCESSOR, "<|image|>"),
}
