"""Operations on pictures of bytes, (height, width, 3): resize, crop, pad, cut into tiles.

Resizing is done by the C++ kernels, or by Pillow where they cannot run. Both return the same bytes.
"""

from __future__ import annotations

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from PIL.Image import Resampling

from fovea.core.measure import stage
from fovea.core.media import Image
from fovea.engine.vision.processor.settings import Settings
from fovea.kernels.native import pictures

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


def picture(image: Image) -> Bytes:
    """The pixels of an image, (height, width, 3), without a copy."""
    return np.frombuffer(image.rgb, np.uint8).reshape(image.height, image.width, 3)


def resize(source: Bytes, height: int, width: int, resample: Resampling) -> Bytes:
    """Resize a picture. A picture that already has this size is returned unchanged."""
    if source.shape[:2] == (height, width):
        return source
    with stage("resize"):
        resized = pictures.resize(source, height, width, resample)
        return resize_with_pillow(source, height, width, resample) if resized is None else resized


def resize_with_pillow(source: Bytes, height: int, width: int, resample: Resampling) -> Bytes:
    """Resize a picture as `resize` does. Works on every machine, but is several times slower."""
    return np.asarray(PIL.Image.fromarray(source).resize((width, height), resample))


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


def make_square(source: Bytes, color: Color) -> Bytes:
    """Make a picture square with a border of `color` along the two longer edges.

    A square is returned itself.
    """
    side = max(source.shape[:2])
    return center_on_canvas(source, side, side, color)


def resize_squared(source: Bytes, color: Color, height: int, width: int, resample: Resampling) -> Bytes:
    """Resize a picture with a border that makes it square, without the square in memory.

    The result is that of `resize(make_square(source, color), height, width, resample)`. The square of a long
    picture may not fit into memory. From a square to a square, PIL resizes along rows first, each row
    independently, and then along columns. So rows are padded and resized in bands, and all rows of the border
    are equal. Only pictures of the result's width ever have the full height. To another shape, PIL may resize
    along columns first; then the square is made.
    """
    side, own = max(source.shape[:2]), source.shape[:2]
    if own[0] == own[1] or side <= _BAND or height != width:
        return resize(make_square(source, color), height, width, resample)
    top = (side - own[0]) // 2
    narrow = np.empty((side, width, 3), np.uint8)
    narrow[:] = resize(np.full((1, side, 3), color, np.uint8), 1, width, resample)
    for y in range(0, own[0], _BAND):
        rows = source[y : y + _BAND]
        band = center_on_canvas(rows, len(rows), side, color)
        narrow[top + y : top + y + len(rows)] = resize(band, len(rows), width, resample)
    return resize(narrow, height, width, resample)


def cut_tiles(pixels: Bytes, tile: int) -> list[Bytes]:
    """Cut into square tiles, row by row. Both edges of `pixels` must be multiples of `tile`."""
    height, width = pixels.shape[:2]
    return [pixels[y : y + tile, x : x + tile] for y in range(0, height, tile) for x in range(0, width, tile)]
