"""Converts text configurations of transformers to `DecoderConfig`: one file per family of decoders.

The family is found by the configuration's model_type, and its file is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import DecoderConfig

Renames = tuple[tuple[str, str], ...]
"""Regular expressions of canonical tensor names, and the names of Fovea's own layers that replace them."""

FAMILIES = {
    "llama": "dense",
    "mistral": "dense",
    "ministral3": "dense",
    "paddleocr_vl_text": "dense",
    "qwen2": "dense",
    "qwen3": "dense",
    "qwen2_vl_text": "dense",
    "qwen2_5_vl_text": "dense",
    "qwen3_vl_text": "dense",
    "qwen3_vl_moe_text": "dense",
    "deepseek_ocr2_text": "deepseek",
    "lfm2": "lfm2",
    "mllama_text_model": "mllama",
    "gemma3_text": "gemma3",
    "glm4v_text": "glm4v",
    "gemma4_text": "gemma4",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
}
"""File of this folder for each model_type of a text configuration."""


def text_config(config: Any) -> Any:
    """Return the text configuration of a model. That of a model for text alone is its only one."""
    return getattr(config, "text_config", config)


def decoder_config(text: Any, *, tied: bool) -> DecoderConfig:
    """Return the shape of the decoder for a text configuration.

    tied: the embedding table is the language head as well.

    Raises UnsupportedModel for a text model, or a feature of it, that the decoder does not compute.
    """
    config: DecoderConfig = _family(text).convert(text, tied=tied)
    return config


def text_renames(text: Any) -> Renames:
    """Return how the tensor names of a text model become those of Fovea's layers."""
    renames: Renames = getattr(_family(text), "RENAMES", ())
    if getattr(text, "enable_moe_block", False):
        renames += getattr(_family(text), "EXPERT_RENAMES", ())
    return renames


def unused_tensors(text: Any) -> tuple[str, ...]:
    """Return regular expressions of canonical names of a text model's tensors that no layer reads."""
    unused = getattr(_family(text), "unused", None)
    return () if unused is None else unused(text)


def _family(text: Any) -> Any:
    name = FAMILIES.get(text.model_type)
    if name is None:
        raise UnsupportedModel(
            f"text model {text.model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return import_module(f"fovea.engine.models.text.{name}")
