"""Computes the identity that names an image in every cache: a hash of its content, never of its origin.

Two URLs with the same bytes have one identity, and so have a Pillow image and an array with the same pixels.
A file and its decoded pixels have different identities: to find out that they agree, every cache lookup would
have to decode the file first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image as Pillow
from PIL import ImageOps

from fovea.core.errors import FoveaError, InvalidImage
from fovea.core.image import Image, content_identity
from fovea.media.image.colour import to_rgb
from fovea.media.image.probe import check_size
from fovea.media.limits import MediaLimits

RAW_MEDIA_TYPE = "image/x-fovea-rgb"
"""The media type of pixels that did not come from a file: `height * width * 3` bytes, row-major."""


def identity_of_source(media_type: str, width: int, height: int, data: bytes) -> str:
    """Return the identity (64 hex digits) of encoded bytes.

    media_type, width, height: as `probe` reads them from the bytes, not as a client declares them.
    """
    return content_identity(media_type, width, height, data)


def identity_of_pixels(width: int, height: int, rgb: bytes) -> str:
    return content_identity(RAW_MEDIA_TYPE, width, height, rgb)


def from_pil(picture: Pillow.Image, limits: MediaLimits | None = None) -> Image:
    """Convert the current frame of a Pillow image: upright by its EXIF tag, and RGB by the rule of `decode`.

    Raises InvalidImage if it breaks a limit or cannot be decoded.
    """
    check_size(picture.width, picture.height, limits or MediaLimits())
    try:
        rgb = to_rgb(ImageOps.exif_transpose(picture))
        pixels = rgb.tobytes()
    except FoveaError:
        raise
    except Exception as error:  # a lazily opened file decodes here, with any of Pillow's exceptions
        raise InvalidImage(f"the Pillow image cannot be decoded: {error}") from error
    return _of_pixels(rgb.width, rgb.height, pixels)


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
