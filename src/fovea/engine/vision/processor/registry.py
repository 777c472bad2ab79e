"""Finds the image processor of a `model_type`. Its file is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

from fovea.core.errors import UnsupportedModel
from fovea.engine.vision.processor.base import ImageProcessor
from fovea.engine.vision.processor.settings import section

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "qwen2_vl": "qwen",
        "qwen2_5_vl": "qwen",
        "qwen3_vl": "qwen",
        "qwen3_vl_moe": "qwen",
        "qwen3_5": "qwen",
        "qwen3_5_moe": "qwen",
        "llava": "llava",
        "llava_next": "llava_next",
        "llava_onevision": "llava_onevision",
        "idefics3": "idefics3",
        "smolvlm": "idefics3",
        "lfm2_vl": "lfm2_vl",
        "gemma3": "gemma3",
        "gemma4": "gemma4",
        "mistral3": "pixtral",
        "lighton_ocr": "lighton_ocr",
        "paddleocr_vl": "paddleocr_vl",
        "glm4v": "glm4v",
        "glm46v": "glm4v",
        "internvl": "internvl",
        "internvl_chat": "internvl_chat",
        "minicpmv4_6": "minicpmv4_6",
        "deepseek_ocr2": "deepseek_ocr2",
        "mllama": "mllama",
    }
)
_KINDS_BY_TOWER: Mapping[tuple[str, str], str] = MappingProxyType({("llava", "pixtral"): "pixtral"})
"""Files of types that several architectures share, by `model_type` and the type of the vision tower."""


def model_types() -> tuple[str, ...]:
    """Every `model_type` that `build` knows, sorted."""
    return tuple(sorted(_KINDS))


def build(
    model_type: str,
    preprocessor_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    processor_config: Mapping[str, Any] = _NOTHING,
) -> ImageProcessor:
    """Build the image processor of a checkpoint.

    preprocessor_config: preprocessor_config.json. Newer checkpoints have it inside processor_config.json, as
        `image_processor`; it is read from there if this is empty.
    model_config: config.json.
    processor_config: processor_config.json.

    Raises UnsupportedModel for an unknown `model_type` or processor class. Raises CheckpointError for a
    setting that would change the pixels in a way that is not implemented, or that contradicts the model's own
    shapes.
    """
    tower = str(section(model_config, "vision_config").get("model_type"))
    module = _KINDS_BY_TOWER.get((model_type, tower)) or _KINDS.get(model_type)
    if module is None:
        raise UnsupportedModel(
            f"no image processor for model_type {model_type!r}; accepted: {', '.join(model_types())}"
        )
    if not preprocessor_config:
        preprocessor_config = processor_config.get("image_processor") or _NOTHING
    kind = import_module(f"fovea.engine.vision.processor.{module}")
    return cast(ImageProcessor, kind.build(preprocessor_config, model_config, processor_config))
