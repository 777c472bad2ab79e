"""The image processor of LightOnOCR: that of Pixtral, but without text between the rows of visual tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fovea.engine.vision.processor.pixtral import PixtralProcessor, read_processor, read_shape
from fovea.engine.vision.processor.settings import Settings, Size


def build(
    preprocessor: Mapping[str, Any], model: Mapping[str, Any], processor: Mapping[str, Any]
) -> PixtralProcessor:
    settings = Settings(preprocessor)
    patch, merge = read_shape(settings, model, processor)
    marker = str(processor.get("image_token") or "<|image_pad|>")
    return read_processor(settings, _step(settings, patch * merge), patch, merge, (marker, "", ""))


def _step(settings: Settings, factor: int) -> int:
    """The setting `patch_size`: the edges of a resized picture are multiples of it.

    If it is smaller than the side of a visual token, patches beyond the last whole token become no token.

    factor: side in pixels of the square that becomes one visual token.
    """
    size = settings.size("patch_size", Size(height=16, width=16))
    edges = None if size is None else size.fixed_size
    if edges is None or edges[0] != edges[1] or edges[0] > factor:
        raise settings.error("patch_size", size, f"one integer, or equal height and width, up to {factor}")
    return edges[0]
