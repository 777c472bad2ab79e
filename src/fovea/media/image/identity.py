"""Computes the identity that names an image in every cache: a hash of its content, never of its origin.

Two URLs with the same bytes have one identity, and so have a Pillow image and an array with the same pixels.
A file and its decoded pixels have different identities: to find out that they agree, every cache lookup would
have to decode the file first. So a Pillow image whose file is at hand is decoded, and named, as the file.
"""

from __future__ import annotations

import io
import struct
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from PIL import Image as Pillow
from PIL import ImageFile, ImageOps

from fovea.core.errors import FoveaError, InvalidImage
from fovea.core.image import Image, content_identity
from fovea.media.image.colour import to_rgb, without_empty_alpha
from fovea.media.image.decode import decode
from fovea.media.image.probe import check_size, format_of
from fovea.media.limits import MediaLimits

RAW_MEDIA_TYPE = "image/x-fovea-rgb"
"""The media type of pixels that did not come from a file: `height * width * 3` bytes, row-major."""


def identity_of_pixels(width: int, height: int, rgb: bytes) -> str:
    return content_identity(RAW_MEDIA_TYPE, width, height, rgb)


def from_pil(picture: Pillow.Image, limits: MediaLimits | None = None) -> Image:
    """Convert the current frame of a Pillow image: upright by EXIF or XMP, RGB by the rule of `decode`.

    If it was opened from a file and neither read nor changed since, the file is decoded: pixels and identity
    are those of `decode`.

    Raises InvalidImage if it breaks a limit or cannot be decoded.
    """
    limits = limits or MediaLimits()
    check_size(picture.width, picture.height, limits)
    try:
        data = _file_of(picture)
        if data is not None:
            return decode(data, replace(limits, first_frame_of_animation=True))
        picture.load()
        rgb = to_rgb(_upright(_with_scaled_key(without_empty_alpha(picture))))
        pixels = rgb.tobytes()
    except FoveaError:
        raise
    except Exception as error:  # a lazily opened file decodes here, with any of Pillow's exceptions
        raise InvalidImage(f"the Pillow image cannot be decoded: {error}") from error
    return _of_pixels(rgb.width, rgb.height, pixels)


def _file_of(picture: Pillow.Image) -> bytes | None:
    """Return the file from which a picture was opened; None unless `decode` gives the same picture."""
    file = picture.fp if isinstance(picture, ImageFile.ImageFile) else None  # None once pixels are loaded
    if file is None or picture.tell() != 0:
        return None
    place = file.tell()
    file.seek(0)
    data = file.read()
    file.seek(place)
    kind = format_of(data)
    if kind is None:
        return None
    with Pillow.open(
        io.BytesIO(data), formats=[kind.name]
    ) as fresh:  # differs if a caller changed the picture
        same = (fresh.mode, fresh.size, fresh.info) == (picture.mode, picture.size, picture.info)
        if same and getattr(picture, "_exif", None) is not None:
            same = dict(picture.getexif()) == dict(fresh.getexif())
    return data if same else None


def _upright(picture: Pillow.Image) -> Pillow.Image:
    try:
        return ImageOps.exif_transpose(picture)
    except (SyntaxError, ValueError, TypeError, LookupError, struct.error):  # damaged EXIF: upright, as files
        return picture


def _with_scaled_key(picture: Pillow.Image) -> Pillow.Image:
    """Give the transparent colour of a loaded PNG the units of its pixels, as `formats.png` does for files.

    Pillow has widened 2-bit and 4-bit grey to 8 bits, narrowed 16-bit RGB, and left the key as it was stored.
    The depth is not known any more. But all pixels are multiples of 85 or 17 then, and an 8-bit key that no
    pixel has would be pointless.
    """
    key = picture.info.get("transparency")
    if picture.format != "PNG":
        return picture
    scaled = key
    if picture.mode == "L" and isinstance(key, int):
        levels = [level for level, count in enumerate(picture.histogram()) if count]
        steps = (
            most for most in (3, 15) if key <= most and not any(level % (255 // most) for level in levels)
        )
        scaled = key * 255 // next(steps, 255)
    elif picture.mode == "RGB" and isinstance(key, tuple) and max(key) > 255:
        scaled = tuple(value >> 8 for value in key)
    if scaled == key:
        return picture
    picture = picture.copy()
    picture.info["transparency"] = scaled
    return picture


def from_array(pixels: npt.NDArray[np.uint8], limits: MediaLimits | None = None) -> Image:
    """Convert an array to an image.

    pixels: uint8 of shape [height, width] (grey), [height, width, 3] (RGB) or [height, width, 4] (RGBA,
        composited over white).
    Raises InvalidImage for another type or shape, and for an array that breaks a limit.
    """
    if pixels.dtype != np.uint8:
        raise InvalidImage(f"the array has dtype {pixels.dtype}; accepted: uint8, 0 to 255")
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise InvalidImage(
            f"the array has shape {list(pixels.shape)}; accepted: [height, width], [height, width, 3 or 4]"
        )
    height, width = pixels.shape[:2]
    check_size(width, height, limits or MediaLimits())
    rgb = to_rgb(Pillow.fromarray(np.ascontiguousarray(pixels)))
    return _of_pixels(width, height, rgb.tobytes())


def _of_pixels(width: int, height: int, rgb: bytes) -> Image:
    return Image(identity_of_pixels(width, height, rgb), width, height, rgb)
