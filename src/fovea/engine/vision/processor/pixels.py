"""The few things done to bytes of pixels before they become floats. All of it is PIL's or numpy's arithmetic."""

from __future__ import annotations

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from PIL.Image import Resampling

from fovea.core.image import Image
from fovea.core.stage import stage
from fovea.engine.vision.processor.settings import Settings

Bytes = NDArray[np.uint8]
Color = tuple[int, int, int]
_BAND = 256  # rows


def read_filter(settings: Settings, default: Resampling) -> Resampling:
    """`resample`: the number of a PIL filter; all of them are supported."""
    value = settings.raw("resample")
    if value is None:
        return default
    numbers = [int(f) for f in Resampling]
    if isinstance(value, bool) or not isinstance(value, int) or value not in numbers:
        accepted = ", ".join(f"{int(f)} ({f.name.lower()})" for f in sorted(Resampling))
        raise settings.wrong("resample", value, accepted)
    return Resampling(value)


def picture(image: Image) -> PIL.Image.Image:
    return PIL.Image.frombuffer("RGB", (image.width, image.height), image.rgb, "raw", "RGB", 0, 1)


def resize(source: PIL.Image.Image, height: int, width: int, resample: Resampling) -> PIL.Image.Image:
    """The source itself where nothing changes; PIL would copy it."""
    if source.size == (width, height):
        return source
    with stage("resize"):
        return source.resize((width, height), resample)


def to_bytes(source: PIL.Image.Image) -> Bytes:
    """(height, width, 3)."""
    return np.asarray(source)


def resized_bytes(image: Image, height: int, width: int, resample: Resampling) -> Bytes:
    """(height, width, 3); a view of the image's own bytes where nothing changes."""
    if (image.height, image.width) == (height, width):
        return np.frombuffer(image.rgb, np.uint8).reshape(height, width, 3)
    return to_bytes(resize(picture(image), height, width, resample))


def center_crop(pixels: Bytes, height: int, width: int) -> Bytes:
    """(h, w, 3) to (height, width, 3): cut where too large, black border where too small.

    An odd leftover goes below and right of a cut, above and left of a border.
    """
    have_h, have_w = pixels.shape[:2]
    top, left = max(0, have_h - height) // 2, max(0, have_w - width) // 2
    cut = pixels[top : top + height, left : left + width]
    if cut.shape[:2] == (height, width):
        return cut
    out = np.zeros((height, width, 3), np.uint8)
    top, left = -(-(height - cut.shape[0]) // 2), -(-(width - cut.shape[1]) // 2)
    out[top : top + cut.shape[0], left : left + cut.shape[1]] = cut
    return out


def centered(pixels: Bytes, height: int, width: int, color: Color = (0, 0, 0)) -> Bytes:
    """(h, w, 3) in the middle of a larger (height, width, 3); an odd leftover goes below and right."""
    have_h, have_w = pixels.shape[:2]
    if (have_h, have_w) == (height, width):
        return pixels
    out = np.empty((height, width, 3), np.uint8)
    out[:] = color
    top, left = (height - have_h) // 2, (width - have_w) // 2
    out[top : top + have_h, left : left + have_w] = pixels
    return out


def squared(source: PIL.Image.Image, color: Color) -> PIL.Image.Image:
    """With a border of `color` along two edges, where it is not square already."""
    side = max(source.size)
    if source.width == source.height:
        return source
    return PIL.Image.fromarray(centered(to_bytes(source), side, side, color))


def resize_squared(
    source: PIL.Image.Image, color: Color, height: int, width: int, resample: Resampling
) -> PIL.Image.Image:
    """`resize(squared(source, color), height, width, resample)`, without the square: that of a long picture may not
    fit into memory.

    From a square to a square PIL resizes along rows first, each row by itself, and then along columns. So the rows
    can be bordered and resized in bands, the border's own rows are all alike, and nothing wider than the result ever
    stands at full height. To another shape PIL may go along columns first; then there has to be a square.
    """
    side = max(source.size)
    if source.width == source.height or side <= _BAND or height != width:
        return resize(squared(source, color), height, width, resample)
    pixels, top = to_bytes(source), (side - source.height) // 2
    narrowed = np.empty((side, width, 3), np.uint8)
    plain = PIL.Image.new("RGB", (side, 1), color)
    narrowed[:] = to_bytes(resize(plain, 1, width, resample))
    for y in range(0, source.height, _BAND):
        rows = pixels[y : y + _BAND]
        band = PIL.Image.fromarray(centered(rows, len(rows), side, color))
        narrowed[top + y : top + y + len(rows)] = to_bytes(resize(band, len(rows), width, resample))
    return resize(PIL.Image.fromarray(narrowed), height, width, resample)


def cut_tiles(pixels: Bytes, tile: int) -> list[Bytes]:
    """Square tiles, row by row; both edges of `pixels` are multiples of `tile`."""
    height, width = pixels.shape[:2]
    return [pixels[y : y + tile, x : x + tile] for y in range(0, height, tile) for x in range(0, width, tile)]
