"""The supported architectures and the modules that implement them. A module is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.models.base import VisionLanguageModel

VIDEO_CLASSES = ("qwen_vl.QwenVL",)
"""Classes whose models take videos."""
TEXT_CLASSES = ("text_only.TextModel",)
"""Classes whose models take text alone."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A supported architecture.

    implementation: file of this folder and class that implement it.
    model_type: as in config.json.
    name: the name for people, as in docs/models.md.
    example: a checkpoint on the hub.
    vision, text: short descriptions of the vision tower and the decoder; "none": there is no tower.
    tower: model_type of vision_config that tells the architecture from others of its model_type; "": any
        other.
    """

    implementation: str
    model_type: str
    name: str
    example: str
    vision: str
    text: str
    tower: str = ""

    @property
    def videos(self) -> bool:
        """Whether it takes videos."""
        return self.implementation in VIDEO_CLASSES

    @property
    def images(self) -> bool:
        """Whether it takes images."""
        return self.implementation not in TEXT_CLASSES


_BY_CLASS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "qwen_vl.QwenVL": (
        ("qwen3_5", "Qwen3.5", "Qwen/Qwen3.5-9B", "any resolution", "Gated DeltaNet and attention, M-RoPE"),
        ("qwen3_5_moe", "Qwen3.5-MoE", "Qwen/Qwen3.6-35B-A3B", "any resolution", "as Qwen3.5, with experts"),
        (
            "qwen3_vl",
            "Qwen3-VL",
            "Qwen/Qwen3-VL-4B-Instruct",
            "any resolution, DeepStack",
            "Qwen3, interleaved M-RoPE",
        ),
        (
            "qwen3_vl_moe",
            "Qwen3-VL-MoE",
            "Qwen/Qwen3-VL-30B-A3B-Instruct",
            "any resolution, DeepStack",
            "Qwen3 with experts, M-RoPE",
        ),
        (
            "qwen2_5_vl",
            "Qwen2.5-VL",
            "Qwen/Qwen2.5-VL-3B-Instruct",
            "any resolution, windowed attention",
            "Qwen2, M-RoPE",
        ),
        ("qwen2_vl", "Qwen2-VL", "Qwen/Qwen2-VL-2B-Instruct", "any resolution", "Qwen2, M-RoPE"),
    ),
    "llava.Llava": (("llava", "LLaVA-1.5", "llava-hf/llava-1.5-7b-hf", "CLIP, fixed resolution", "Llama"),),
    "llava.LlavaNext": (
        (
            "llava_next",
            "LLaVA-NeXT",
            "llava-hf/llama3-llava-next-8b-hf",
            "CLIP, tiles",
            "Llama, Qwen2 or Mistral",
        ),
    ),
    "llava.LlavaOnevision": (
        (
            "llava_onevision",
            "LLaVA-OneVision",
            "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
            "SigLIP, tiles",
            "Qwen2",
        ),
    ),
    "idefics3.Idefics3": (
        ("idefics3", "Idefics3", "HuggingFaceM4/Idefics3-8B-Llama3", "SigLIP, tiles, pixel shuffle", "Llama"),
        (
            "smolvlm",
            "SmolVLM",
            "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
            "SigLIP, tiles, pixel shuffle",
            "Llama",
        ),
    ),
    "gemma4.Gemma4": (
        ("gemma4", "Gemma 4", "google/gemma-4-E2B-it", "any aspect, averaged", "Gemma 4: sliding windows"),
    ),
    "mllama.Mllama": (
        (
            "mllama",
            "Llama 3.2 Vision",
            "meta-llama/Llama-3.2-11B-Vision-Instruct",
            "own tower, tiles on a canvas",
            "Llama, cross-attention",
        ),
    ),
    "lfm2_vl.Lfm2VL": (
        (
            "lfm2_vl",
            "LFM2-VL",
            "LiquidAI/LFM2-VL-450M",
            "SigLIP 2, tiles",
            "LFM2: convolutions and attention",
        ),
    ),
    "gemma3.Gemma3": (
        ("gemma3", "Gemma 3", "google/gemma-3-4b-it", "SigLIP, fixed resolution", "Gemma 3: sliding windows"),
    ),
    "pixtral.Pixtral": (
        (
            "mistral3",
            "Mistral 3, Ministral 3",
            "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
            "Pixtral: any resolution",
            "Mistral or Ministral 3",
        ),
        (
            "llava",
            "Pixtral",
            "mistral-community/pixtral-12b",
            "Pixtral: any resolution",
            "Mistral",
            "pixtral",
        ),
        ("lighton_ocr", "LightOnOCR", "lightonai/LightOnOCR-1B-1025", "Pixtral: any resolution", "Qwen3"),
    ),
    "paddleocr_vl.PaddleOCRVL": (
        (
            "paddleocr_vl",
            "PaddleOCR-VL",
            "PaddlePaddle/PaddleOCR-VL",
            "SigLIP, any resolution",
            "ERNIE-4.5, M-RoPE",
        ),
    ),
    "glm4v.Glm4v": (
        ("glm4v", "GLM-4.1V", "zai-org/GLM-4.1V-9B-Thinking", "any resolution", "GLM-4, M-RoPE"),
        ("glm46v", "GLM-4.6V-Flash", "zai-org/GLM-4.6V-Flash", "as GLM-4.1V", "GLM-4, M-RoPE"),
    ),
    "internvl.InternVL": (
        ("internvl", "InternVL", "OpenGVLab/InternVL3-1B-hf", "InternViT, tiles", "Qwen2, Qwen3 or Llama"),
        (
            "internvl_chat",
            "InternVL (original)",
            "OpenGVLab/InternVL3-1B",
            "InternViT, tiles",
            "Qwen2, Qwen3, Llama or InternLM2",
        ),
    ),
    "minicpmv4_6.MiniCPMV4_6": (
        ("minicpmv4_6", "MiniCPM-V 4.6", "openbmb/MiniCPM-V-4.6", "SigLIP, tiles of any shape", "Qwen3.5"),
    ),
    "deepseek_ocr2.DeepseekOcr2": (
        (
            "deepseek_ocr2",
            "DeepSeek-OCR 2",
            "deepseek-community/DeepSeek-OCR-2",
            "SAM and queries, tiles",
            "DeepSeek: shared experts",
        ),
    ),
    "text_only.TextModel": (
        ("llama", "Llama, SmolLM2", "HuggingFaceTB/SmolLM2-135M-Instruct", "none", "Llama"),
        ("mistral", "Mistral", "mistralai/Mistral-7B-Instruct-v0.3", "none", "Mistral"),
        ("qwen2", "Qwen2, Qwen2.5", "Qwen/Qwen2.5-0.5B-Instruct", "none", "Qwen2"),
        ("qwen3", "Qwen3", "Qwen/Qwen3-0.6B", "none", "Qwen3"),
        ("gemma3_text", "Gemma 3, text alone", "google/gemma-3-270m-it", "none", "Gemma 3: sliding windows"),
    ),
}
"""The architectures that each class implements: see the fields of `Architecture`, from the second on."""

ARCHITECTURES = tuple(
    Architecture(implementation, *row) for implementation, rows in _BY_CLASS.items() for row in rows
)


def architecture(model_type: str, tower: str = "") -> Architecture:
    """Return the architecture of that model_type. Raises UnsupportedModel, which names the supported ones.

    tower: model_type of the vision tower. It decides only where several architectures share a model_type.
    """
    entries = [entry for entry in ARCHITECTURES if entry.model_type == model_type]
    for entry in entries:
        if entry.tower == tower:
            return entry
    for entry in entries:
        if not entry.tower:
            return entry
    known = ", ".join(dict.fromkeys(entry.model_type for entry in ARCHITECTURES))
    raise UnsupportedModel(f"model_type {model_type!r} is not supported; supported: {known}")


def architecture_of(config: Any) -> Architecture:
    """Return the architecture of a transformers configuration. Raises UnsupportedModel."""
    tower = getattr(config, "vision_config", None)
    return architecture(config.model_type, getattr(tower, "model_type", ""))


def video_model_names() -> str:
    """Return the names of the architectures that take videos, separated by commas, for messages."""
    return ", ".join(entry.name for entry in ARCHITECTURES if entry.videos)


def build(config: Any) -> VisionLanguageModel:
    """Build a model with uninitialised weights from a transformers configuration. Raises UnsupportedModel."""
    file, _, name = architecture_of(config).implementation.partition(".")
    model: VisionLanguageModel = getattr(import_module(f"fovea.engine.models.{file}"), name)(config)
    return model
