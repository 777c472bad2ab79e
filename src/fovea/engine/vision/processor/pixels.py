"""Operations on pixels while they are bytes: resize, crop, pad, cut into tiles.

PIL and numpy compute them.
"""

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
_BAND = 256
"""Rows of a picture that `resize_squared` resizes at once."""


def read_filter(settings: Settings, default: Resampling) -> Resampling:
    """The setting `resample`: the number of a PIL filter.

    All filters are supported. Raises CheckpointError.
    """
    value = settings.raw("resample")
    if value is None:
        return default
    numbers = [int(f) for f in Resampling]
    if isinstance(value, bool) or not isinstance(value, int) or value not in numbers:
        accepted = ", ".join(f"{int(f)} ({f.name.lower()})" for f in sorted(Resampling))
        raise settings.error("resample", value, accepted)
    return Resampling(value)


def picture(image: Image) -> PIL.Image.Image:
    """The image as a PIL image, without a copy of its pixels."""
    pixels = np.frombuffer(image.rgb, np.uint8)
    return PIL.Image.frombuffer("RGB", (image.width, image.height), pixels, "raw", "RGB", 0, 1)


def resize(source: PIL.Image.Image, height: int, width: int, resample: Resampling) -> PIL.Image.Image:
    """Resize a picture. A picture of this size already is returned itself, where PIL would copy it."""
    if source.size == (width, height):
        return source
    with stage("resize"):
        return source.resize((width, height), resample)


def to_bytes(source: PIL.Image.Image) -> Bytes:
    """The pixels of a picture, (height, width, 3)."""
    return np.asarray(source)


def resize_to_bytes(image: Image, height: int, width: int, resample: Resampling) -> Bytes:
    """Resize an image to (height, width, 3). For an image of this size already, a view of its own bytes."""
    if (image.height, image.width) == (height, width):
        return np.frombuffer(image.rgb, np.uint8).reshape(height, width, 3)
    return to_bytes(resize(picture(image), height, width, resample))


def center_crop(pixels: Bytes, height: int, width: int) -> Bytes:
    """Crop (h, w, 3) to (height, width, 3) around its center. A side that is too short gets a black border.

    If the difference is odd, one line more is cut below and at the right; a border is one line wider above
    and at the left.
    """
    old_height, old_width = pixels.shape[:2]
    top, left = max(0, old_height - height) // 2, max(0, old_width - width) // 2
    cut = pixels[top : top + height, left : left + width]
    if cut.shape[:2] == (height, width):
        return cut
    out = np.zeros((height, width, 3), np.uint8)
    top, left = -(-(height - cut.shape[0]) // 2), -(-(width - cut.shape[1]) // 2)
    out[top : top + cut.shape[0], left : left + cut.shape[1]] = cut
    return out


def center_on_canvas(pixels: Bytes, height: int, width: int, color: Color = (0, 0, 0)) -> Bytes:
    """Put (h, w, 3) into the middle of a larger canvas (height, width, 3) of one color.

    If the difference is odd, the border is one line wider below and at the right.
    """
    old_height, old_width = pixels.shape[:2]
    if (old_height, old_width) == (height, width):
        return pixels
    out = np.empty((height, width, 3), np.uint8)
    out[:] = color
    top, left = (height - old_height) // 2, (width - old_width) // 2
    out[top : top + old_height, left : left + old_width] = pixels
    return out


def make_square(source: PIL.Image.Image, color: Color) -> PIL.Image.Image:
    """Make a picture square with a border of `color` along the two longer edges.

    A square is returned itself.
    """
    side = max(source.size)
    if source.width == source.height:
        return source
    return PIL.Image.fromarray(center_on_canvas(to_bytes(source), side, side, color))


def resize_squared(
    source: PIL.Image.Image, color: Color, height: int, width: int, resample: Resampling
) -> PIL.Image.Image:
    """Resize a picture with a border that makes it square, without the square in memory.

    The result is that of `resize(make_square(source, color), height, width, resample)`. The square of a long
    picture may not fit into memory. From a square to a square, PIL resizes along rows first, each row
    independently, and then along columns. So rows are padded and resized in bands, and all rows of the border
    are equal. Only pictures of the result's width ever have the full height. To another shape, PIL may resize
    along columns first; then the square is made.
    """
    side = max(source.size)
    if source.width == source.height or side <= _BAND or height != width:
        return resize(make_square(source, color), height, width, resample)
    pixels, top = to_bytes(source), (side - source.height) // 2
    narrow = np.empty((side, width, 3), np.uint8)
    border = PIL.Image.new("RGB", (side, 1), color)
    narrow[:] = to_bytes(resize(border, 1, width, resample))
    for y in range(0, source.height, _BAND):
        rows = pixels[y : y + _BAND]
        band = PIL.Image.fromarray(center_on_canvas(rows, len(rows), side, color))
        narrow[top + y : top + y + len(rows)] = to_bytes(resize(band, len(rows), width, resample))
    return resize(PIL.Image.fromarray(narrow), height, width, resample)


def cut_tiles(pixels: Bytes, tile: int) -> list[Bytes]:
    """Cut into square tiles, row by row. Both edges of `pixels` must be multiples of `tile`."""
    height, width = pixels.shape[:2]
    return [pixels[y : y + tile, x : x + tile] for y in range(0, height, tile) for x in range(0, width, tile)]
