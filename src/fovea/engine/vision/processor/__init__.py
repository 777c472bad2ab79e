"""Image and video processors: from decoded pixels to the input of a vision encoder. It must not import torch.

There is one file per kind of model, with numpy and PIL only.

`build` picks the kind by the checkpoint's `model_type`. A processor first makes a `VisualPlan` from an
image's dimensions alone (how many tokens, which prompt text, which cache key), and later turns pixels into
arrays. Results equal those of the checkpoint's own Hugging Face PIL processor bit for bit at the default
budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from types import MappingProxyType
from typing import cast

from fovea.core.errors import UnsupportedModel
from fovea.engine.vision.processor.base import ImageProcessor, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.settings import Config, section

__all__ = ["ImageProcessor", "ProcessedImage", "VisualPlan", "build", "model_types"]

_NOTHING: Config = MappingProxyType({})
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "qwen2_vl": "qwen:QWEN.build",
        "qwen2_5_vl": "qwen:QWEN.build",
        "qwen3_vl": "qwen:QWEN.build",
        "qwen3_vl_moe": "qwen:QWEN.build",
        "qwen3_5": "qwen:QWEN.build",
        "qwen3_5_moe": "qwen:QWEN.build",
        "llava": "llava",
        "llava_next": "llava_next",
        "llava_onevision": "llava_next:build_onevision",
        "idefics3": "idefics3",
        "smolvlm": "idefics3",
        "lfm2_vl": "lfm2_vl",
        "gemma3": "gemma3",
        "gemma4": "gemma4",
        "mistral3": "pixtral",
        "lighton_ocr": "pixtral:build_lighton_ocr",
        "paddleocr_vl": "qwen:PADDLEOCR_VL.build",
        "glm4v": "qwen:GLM4V.build",
        "glm46v": "qwen:GLM4V.build",
        "internvl": "internvl",
        "internvl_chat": "internvl:build_chat",
        "minicpmv4_6": "minicpmv4_6",
        "deepseek_ocr2": "deepseek_ocr2",
        "mllama": "mllama",
    }
)
"""The file of each `model_type`, and the function in it that builds the processor, if it is not `build`."""
_KINDS_BY_TOWER: Mapping[tuple[str, str], str] = MappingProxyType({("llava", "pixtral"): "pixtral"})
"""Files of types that several architectures share, by `model_type` and the type of the vision tower."""


def model_types() -> tuple[str, ...]:
    """Every `model_type` that `build` knows, sorted."""
    return tuple(sorted(_KINDS))


def build(
    model_type: str, preprocessor_config: Config, model_config: Config, processor_config: Config = _NOTHING
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
    kind = _KINDS_BY_TOWER.get((model_type, tower)) or _KINDS.get(model_type)
    if kind is None:
        raise UnsupportedModel(
            f"no image processor for model_type {model_type!r}; accepted: {', '.join(model_types())}"
        )
    if not preprocessor_config:
        preprocessor_config = processor_config.get("image_processor") or _NOTHING
    file, _, function = kind.partition(":")
    module = import_module(f"fovea.engine.vision.processor.{file}")
    builder = attrgetter(function or "build")(module)
    return cast(ImageProcessor, builder(preprocessor_config, model_config, processor_config))
