"""Writes checkpoint folders that transformers and Fovea can load."""

from __future__ import annotations

import json
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import parts
from tests.support.checkpoints.architectures import ARCHITECTURES, Builder
from tests.support.checkpoints.gemma import gemma4
from tests.support.checkpoints.qwen import video_processor
from tests.support.checkpoints.templates import OWN_TEMPLATES, TEMPLATES
from tests.support.checkpoints.tokens import LAST_SPECIALS, MORE_SPECIALS, VIDEO_MARKERS, tokenizer
from tests.support.internvl import to_original

PROCESSOR_CONFIGS: dict[str, dict[str, Any]] = {
    "internvl": {"image_seq_length": 4},
    "deepseek_ocr2": {"patch_size": 2, "downsample_ratio": 4},
}
"""Settings in processor_config.json of some architectures."""


def write(architecture: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint folder that transformers and Fovea can load.

    The weights vary enough that logits differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files(architecture, seed, dtype, parts.TEXT_LAYERS).items():
        (folder / name).write_bytes(content)
    return folder


def write_gemma4(folder: Path, **changes: Any) -> Path:
    """Write a tiny Gemma 4. changes: of its text configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    _, processor, marker = ARCHITECTURES["gemma4"]
    return _write("gemma4", folder, 0, torch.float32, (partial(gemma4, **changes), processor, marker))


@cache
def _files(architecture: str, seed: int, dtype: torch.dtype, layers: int) -> dict[str, bytes]:
    """Return the files of a checkpoint by their names. They are made once per process."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = _write(architecture, Path(scratch), seed, dtype)
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def _write(
    architecture: str,
    folder: Path,
    seed: int,
    dtype: torch.dtype,
    entry: tuple[Builder, dict[str, Any], str] | None = None,
) -> Path:
    builder, processor, marker = entry or ARCHITECTURES[architecture]
    template = OWN_TEMPLATES.get(architecture, TEMPLATES[marker])
    words = tokenizer(template, MORE_SPECIALS.get(architecture, ()), LAST_SPECIALS.get(architecture, ()))
    ids = {"image_token_id": words.convert_tokens_to_ids(marker)}
    if architecture.startswith("qwen"):
        ids |= {
            "video_token_id": words.convert_tokens_to_ids("<|video_pad|>"),
            "vision_start_token_id": words.convert_tokens_to_ids("<|vision_start|>"),
            "vision_end_token_id": words.convert_tokens_to_ids("<|vision_end|>"),
        }
    if architecture == "paddleocr_vl":
        ids |= {
            "vision_start_token_id": words.convert_tokens_to_ids("<|IMAGE_START|>"),
            "vision_end_token_id": words.convert_tokens_to_ids("<|IMAGE_END|>"),
        }
    if architecture in VIDEO_MARKERS:
        ids["video_token_id"] = words.convert_tokens_to_ids(VIDEO_MARKERS[architecture])
    torch.manual_seed(seed)
    model = randomise(builder(ids).eval())
    if architecture == "gemma4":
        # transformers takes image tokens that a model chooses for images. With a row of zeros none is chosen.
        model.get_input_embeddings().weight.data[ids["image_token_id"]] = 0
    model.to(dtype).save_pretrained(folder)
    words.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    if architecture.startswith("qwen"):
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video_processor(architecture)))
    side = {"processor_class": "any"}
    if architecture in ("llava", "llava_next"):
        side |= {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        }
    if architecture == "llava_onevision":
        side |= {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    if architecture in ("idefics3", "smolvlm"):
        side |= {"image_seq_len": 16}
    if architecture in ("pixtral", "mistral3", "lighton_ocr"):
        side |= {"patch_size": 14, "spatial_merge_size": 1 if architecture == "pixtral" else 2}
    side |= PROCESSOR_CONFIGS.get(architecture, {})
    (folder / "processor_config.json").write_text(json.dumps(side))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": 2}))
    return to_original(folder) if architecture == "internvl_chat" else folder


@torch.no_grad()
def randomise(model: Any) -> Any:
    """Give a model random weights that differ enough for logits to differ. Returns the model."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(-4, -1)  # slow decay: answers depend on all tokens of a prompt
        elif parameter.ndim > 1:
            parameter.normal_(0, 0.12)
        elif parameter.numel() == 1:
            parameter.uniform_(0.5, 1)  # gates are open
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
