"""The oracle for LFM2-VL's images: the processor class of transformers, without torchvision.

The class needs torchvision for two things only: its resize, which for bytes is torch's own `interpolate`, and
its normalisation. So the class is compiled directly from its file, with a base class that computes these two.
"""

from __future__ import annotations

import ast
import logging
import math
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from transformers.image_transforms import group_images_by_shape, reorder_images, split_to_tiles
from transformers.image_utils import SizeDict
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from fovea.core.media import Image

MODES = {2: "bilinear", 3: "bicubic"}
"""Names of torch for the filters by PIL's numbers."""


class _Backend:
    """The part of transformers' `TorchvisionBackend` that the class uses."""

    def __init__(self, **settings: Any) -> None:
        for name, value in settings.items():
            setattr(self, name, value)

    def resize(
        self, image: torch.Tensor, size: SizeDict, resample: int, antialias: bool = True
    ) -> torch.Tensor:
        target = (size.height, size.width)
        if image.shape[-2:] == target:
            return image
        return torch.nn.functional.interpolate(image, target, mode=MODES[resample], antialias=antialias)

    def rescale_and_normalize(
        self, images: torch.Tensor, _: bool, factor: float, __: bool, mean: list[float], std: list[float]
    ) -> torch.Tensor:
        middle, width = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
        return (images.float() * factor - middle) / width


def _processor_class() -> Any:
    path = Path(transformers.__file__).parent / "models/lfm2_vl/image_processing_lfm2_vl.py"
    wanted = (ast.FunctionDef, ast.ClassDef)
    nodes = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, wanted) and node.name != "Lfm2VlImageProcessorKwargs"
    ]
    names: dict[str, Any] = {
        "math": math, "torch": torch, "lru_cache": lru_cache, "TorchvisionBackend": _Backend,
        "SizeDict": SizeDict, "BatchFeature": lambda data, tensor_type: data,
        "auto_docstring": lambda code: code, "logger": logging.getLogger(__name__),
        "PILImageResampling": SimpleNamespace(BILINEAR=2), "Lfm2VlImageProcessorKwargs": None,
        "group_images_by_shape": group_images_by_shape, "reorder_images": reorder_images,
        "split_to_tiles": split_to_tiles, "IMAGENET_STANDARD_MEAN": [0.5] * 3,
        "IMAGENET_STANDARD_STD": [0.5] * 3,
    }  # fmt: skip
    exec(compile(ast.Module(nodes, []), str(path), "exec", flags=annotations.compiler_flag), names)
    return names["Lfm2VlImageProcessor"]


PROCESSOR_CLASS = _processor_class()
SETTINGS = (
    "do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std",
    "downsample_factor", "do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens",
    "max_image_tokens", "encoder_patch_size", "tile_size", "max_pixels_tolerance", "do_pad",
)  # fmt: skip
"""Arguments of its `_preprocess`, which are attributes of the class."""


def run(image: Image, **settings: Any) -> dict[str, Any]:
    """The outputs of transformers' class for one image. settings: those of preprocessor_config.json."""
    processor = PROCESSOR_CLASS(**settings)
    pixels = torch.from_numpy(np.frombuffer(image.rgb, np.uint8).reshape(image.height, image.width, 3).copy())
    output: dict[str, Any] = processor._preprocess(
        [pixels.permute(2, 0, 1)],
        **{name: getattr(processor, name) for name in SETTINGS},
        return_row_col_info=True,
        return_tensors="pt",
        disable_grouping=None,
    )
    return output


def text(output: dict[str, Any], *, names: bool = True, **settings: Any) -> str:
    """The text that transformers puts in the place of the image. names: `use_image_special_tokens`."""
    processor: Any = object.__new__(Lfm2VlProcessor)
    processor.image_processor = PROCESSOR_CLASS(**settings)
    processor.image_token, processor.image_thumbnail_token = "<image>", "<|img_thumbnail|>"
    processor.image_start_token, processor.image_end_token = "<|image_start|>", "<|image_end|>"
    replaced: str = processor.replace_image_token(output, 0, use_image_special_tokens=names)
    return replaced


def pictures(output: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    """The patches of every tile and view, (patches, values), without the padding."""
    mask = output["pixel_attention_mask"].bool()
    return [rows[kept].numpy() for rows, kept in zip(output["pixel_values"], mask, strict=True)]
