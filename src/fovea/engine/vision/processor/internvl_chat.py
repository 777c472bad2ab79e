"""The image processor of InternVL checkpoints in the original layout (`internvl_chat`).

The original code reads the tiling from config.json. It does not read preprocessor_config.json, which
describes a CLIP processor for single tiles; that file is only checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL.Image import Resampling

from fovea.engine.vision.processor.internvl import InternVLProcessor, read_tile_limits, tokens_per_tile
from fovea.engine.vision.processor.pixels import Palette, read_filter
from fovea.engine.vision.processor.settings import Settings, Size

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def build(
    preprocessor: Mapping[str, Any], model: Mapping[str, Any], processor: Mapping[str, Any]
) -> InternVLProcessor:
    """Build the processor. model: config.json as `engine.models.internvl_chat` translates it."""
    tiling = Settings(model, "config.json")
    least, most = read_tile_limits(tiling, "min_dynamic_patch", "max_dynamic_patch", 6)
    if not tiling.flag("dynamic_image_size", False):
        least = most = 1
    whole = tiling.flag("use_thumbnail", False)
    settings = Settings(preprocessor)
    settings.processor_type(("CLIPImageProcessor",), "CLIPImageProcessor")
    size = settings.size("size", Size(height=448, width=448))
    crop = settings.size("crop_size", size)
    edge = _square(size)
    if not edge or _square(crop) != edge:
        raise settings.error("size", (size, crop), "one edge for size and crop_size")
    # A tile has this size already, so neither of these changes it.
    settings.flag("do_resize", True)
    settings.flag("do_center_crop", True)
    palette = Palette.read(settings, IMAGENET_MEAN, IMAGENET_STD)
    resample = read_filter(settings, Resampling.BICUBIC)
    settings.close()
    return InternVLProcessor(palette, resample, edge, least, most, whole, tokens_per_tile(edge, model))


def _square(size: Size | None) -> int:
    """The edge of a square size, which old files name shortest_edge; 0: it is no square."""
    if size is None:
        return 0
    height, width = size.fixed_size or (size.shortest_edge, size.shortest_edge)
    return height if height and height == width else 0
