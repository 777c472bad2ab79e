"""The oracle for videos: transformers' own sampling, sizes, patches, prompt text, positions and generation.

The video processors of transformers need torchvision, and transformers hides their modules if it is missing.
Their arithmetic is in functions and methods that need no instance, so these are compiled directly from the
files.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from tests.support.reference import Reference


def _source(package: str) -> Any:
    """`smart_resize`, `sample_frames` and `patchify`, compiled from the file of a video processor."""
    path = Path(transformers.__file__).parent / "models" / package / f"video_processing_{package}.py"
    tree = ast.parse(path.read_text())
    wanted = {"smart_resize", "sample_frames", "patchify"}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in wanted]
    names: dict[str, Any] = {"math": math, "np": np, "torch": torch, "VideoMetadata": VideoMetadata}
    code = compile(ast.Module(nodes, []), str(path), "exec", flags=annotations.compiler_flag)
    exec(code, names)
    return SimpleNamespace(**{name: names[name] for name in {node.name for node in nodes}})


qwen2, qwen3 = _source("qwen2_vl"), _source("qwen3_vl")


def sample(newest: bool, total: int, fps: float, wanted_fps: float, least: int, most: int) -> list[int]:
    """The numbers of the frames that transformers samples. newest: for Qwen3-VL instead of Qwen2-VL."""
    metadata = VideoMetadata(total_num_frames=total, fps=fps)
    own = SimpleNamespace(
        min_frames=least, max_frames=most, fps=wanted_fps, num_frames=None, temporal_patch_size=2
    )
    indices = (qwen3 if newest else qwen2).sample_frames(own, metadata, fps=wanted_fps)
    return [int(index) for index in indices]


def patches(frames: NDArray[np.float32], patch: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """The patches of one video by transformers' `patchify`, and its grid (t, h, w).

    frames: (count, 3, height, width), normalised.
    """
    output = qwen2.patchify(None, torch.from_numpy(frames)[None], patch, 2, 2)
    return output[0][0], output[1:]


def placeholder(grid: tuple[int, int, int], indices: list[int], fps: float) -> str:
    """The text that Qwen3-VL's processor puts in the place of one video marker."""
    processor: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    processor._calculate_timestamps = lambda *args: Qwen3VLProcessor._calculate_timestamps(processor, *args)
    metadata = SimpleNamespace(fps=fps, frames_indices=list(indices))
    inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata]}
    return Qwen3VLProcessor.replace_video_token(processor, inputs, 0)


def inputs(
    reference: Reference,
    ids: list[int],
    pixels: NDArray[np.float32],
    grid: tuple[int, int, int],
    seconds: float,
) -> dict[str, Any]:
    """The arguments that transformers' processor class would pass to the model for one video."""
    tokens = torch.tensor([ids])
    arguments: dict[str, Any] = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values_videos": torch.from_numpy(pixels),
        "video_grid_thw": torch.tensor([grid]),
        "mm_token_type_ids": 2 * (tokens == reference.model.config.video_token_id).int(),
    }
    if reference.kind == "qwen2_5_vl":
        arguments["second_per_grid_ts"] = torch.tensor([seconds])
    return arguments


@torch.inference_mode()
def generate(reference: Reference, count: int, **arguments: Any) -> list[int]:
    length = arguments["input_ids"].shape[1]
    out = reference.model.generate(
        **arguments,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, length:].tolist()
    return tokens


def positions(reference: Reference, arguments: dict[str, Any]) -> tuple[NDArray[np.int64], int]:
    extra = {k: arguments[k] for k in ("second_per_grid_ts",) if k in arguments}
    places, delta = reference.model.model.get_rope_index(
        arguments["input_ids"],
        arguments["mm_token_type_ids"],
        video_grid_thw=arguments["video_grid_thw"],
        **extra,
    )
    return places[:, 0].numpy(), int(delta.flatten()[0])
