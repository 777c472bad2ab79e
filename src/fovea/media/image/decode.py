"""Decodes image files to RGB pixels, and names images by content. Only here Pillow decodes clients' data.

The order matters: first header and limits (`probe`), then extraction of only those bytes that the pixels need
(`Format.essence`), then Pillow with only the decoder of the header's format. Every failure becomes
InvalidImage; an incomplete picture is refused instead of decoded half grey. Colour profiles are ignored,
because the models' reference implementations ignore them, too.

Transparency is composited over white, as documents, charts and screenshots assume. Without the alpha channel,
the colour that an editor left behind transparent pixels would show, often black.

The identity of an image is a hash of its content, never of its origin. Two URLs with the same bytes have one
identity, and so have a Pillow image and an array with the same pixels.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from PIL import Image as Pillow
from PIL import (
    ImageFile,
    ImageOps,
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401  registers its decoder; without it Pillow would import its forty other ones
)

from fovea.core.errors import FoveaError, InvalidImage
from fovea.core.measure import stage
from fovea.core.media import Image, content_identity
from fovea.media.image.base import Format
from fovea.media.image.probe import ImageHeader, check_size, check_still, format_of, probe, upright_size
from fovea.media.limits import MediaLimits

BAND_BYTES = 1 << 20
"""Size of a band of rows, about, whose colours are converted at once."""
_TURNS = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}
_WITH_ALPHA = frozenset(("RGBA", "LA", "PA", "RGBa", "La"))
_SIXTEEN_BIT = frozenset(("I;16", "I;16L", "I;16B", "I;16N"))
_WITH_COLOUR_KEY = frozenset(("1", "L", "P", "RGB"))
_OPAQUE = frozenset(("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"))
_EMPTY_ALPHA_IS_NONE = frozenset(("BMP", "DIB", "ICO", "CUR", "TGA"))
MODES = _WITH_ALPHA | _SIXTEEN_BIT | _OPAQUE
RAW_MEDIA_TYPE = "image/x-fovea-rgb"
"""The media type of pixels that did not come from a file: `height * width * 3` bytes, row-major."""


def decode(data: bytes, limits: MediaLimits, identity: str | None = None) -> Image:
    """Decode a still image to upright RGB pixels.

    identity: the result of `identify` for these bytes, if the caller has it.
    Raises only InvalidImage. CPU-bound: call in a thread.
    """
    with stage("image decode"):
        header = probe(data, limits)
        rgb = b"".join(decode_bands(data, header, limits))
        return Image(identity or identify(data, header), header.width, header.height, rgb)


def decode_bands(data: bytes, header: ImageHeader, limits: MediaLimits) -> Iterator[bytes]:
    """Decode a still image, and yield its upright RGB pixels from top to bottom, a band of rows at a time.

    Colours are converted band by band, because a large picture with transparency would otherwise be in memory
    five times.

    header: as `probe` reads it from the file.
    Raises only InvalidImage.
    """
    check_still(header, limits)
    kind = format_of(data)
    assert kind is not None  # `probe` would have raised
    with _errors_of(kind):
        picture = _upright(kind, kind.essence(data), header)
        rows = max(1, BAND_BYTES // (header.width * 3))
        for top in range(0, header.height, rows):
            box = (0, top, header.width, min(top + rows, header.height))
            yield to_rgb(picture if rows >= header.height else picture.crop(box)).tobytes()


def identify(data: bytes, header: ImageHeader) -> str:
    """Return the identity that the decoded image will have. Hashes all bytes: call in a thread."""
    return content_identity(header.media_type, header.width, header.height, data)


def _upright(kind: Format, essence: bytes, header: ImageHeader) -> Pillow.Image:
    """Decode a picture in the colours of its file."""
    with Pillow.open(io.BytesIO(essence), formats=[kind.name]) as file:
        transposition = _TURNS.get(header.orientation)
        if upright_size(*file.size, header.orientation) != (header.width, header.height):
            raise InvalidImage(f"the {kind.name} is corrupt: its header contradicts itself about the size")
        file.load()
        picture = without_empty_alpha(file)
        return picture if transposition is None else picture.transpose(transposition)


@contextmanager
def _errors_of(kind: Format) -> Iterator[None]:
    """Turn every error of a decoder into InvalidImage."""
    try:
        yield
    except FoveaError:
        raise
    except Exception as error:
        # Decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error, EOFError, MemoryError and
        # more for bad data, and the list changes between releases. For the caller all of them mean the same.
        raise InvalidImage(f"the {kind.name} cannot be decoded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "its header is damaged"  # Pillow's own text contains the name of a Python object
    if isinstance(error, MemoryError):
        return "not enough memory for its pixels"
    return (str(error) or type(error).__name__)[:200]


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
        rgb = to_rgb(_turned_upright(_with_scaled_key(without_empty_alpha(picture))))
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
    # It differs if a caller changed the picture.
    with Pillow.open(io.BytesIO(data), formats=[kind.name]) as fresh:
        same = (fresh.mode, fresh.size, fresh.info) == (picture.mode, picture.size, picture.info)
        if same and getattr(picture, "_exif", None) is not None:
            same = dict(picture.getexif()) == dict(fresh.getexif())
    return data if same else None


def _turned_upright(picture: Pillow.Image) -> Pillow.Image:
    try:
        return ImageOps.exif_transpose(picture)
    except (SyntaxError, ValueError, TypeError, LookupError, struct.error):  # damaged EXIF: upright, as files
        return picture


def _with_scaled_key(picture: Pillow.Image) -> Pillow.Image:
    """Give the transparent colour of a loaded PNG the units of its pixels, as `png` does for files.

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


def _of_pixels(width: int, height: int, rgb: bytes) -> Image:
    return Image(identity_of_pixels(width, height, rgb), width, height, rgb)


def identity_of_pixels(width: int, height: int, rgb: bytes) -> str:
    return content_identity(RAW_MEDIA_TYPE, width, height, rgb)


def to_rgb(picture: Pillow.Image) -> Pillow.Image:
    """Convert a picture to RGB, at its size. Raises InvalidImage for modes without a defined range (F, I)."""
    mode = picture.mode
    if mode not in MODES:
        raise InvalidImage(f"the picture has mode {mode}; accepted: {', '.join(sorted(MODES))}")
    if mode in _SIXTEEN_BIT:
        return _from_sixteen_bit(picture)
    if mode in _WITH_ALPHA or (mode in _WITH_COLOUR_KEY and "transparency" in picture.info):
        return _over_white(_to_rgba(picture))
    return picture if mode == "RGB" else picture.convert("RGB")


def without_empty_alpha(picture: Pillow.Image) -> Pillow.Image:
    """Return a picture without its alpha channel if that is 0 everywhere and the file's format is an old one.

    Many writers of these formats, the Windows clipboard among them, announce an alpha channel and leave it 0.
    Browsers and Windows show such a picture opaque. In PNG and WebP, an alpha channel means what it says.
    """
    if picture.format not in _EMPTY_ALPHA_IS_NONE or picture.mode not in ("RGBA", "LA"):
        return picture
    empty = picture.getchannel("A").getextrema() == (0, 0)
    return picture.convert(picture.mode[:-1]) if empty else picture


def _to_rgba(picture: Pillow.Image) -> Pillow.Image:
    if picture.mode == "La":  # Pillow cannot convert La to RGBA directly
        picture = picture.convert("LA")
    return picture if picture.mode == "RGBA" else picture.convert("RGBA")


def _over_white(picture: Pillow.Image) -> Pillow.Image:
    alpha = picture.getchannel("A")
    rgb = picture.convert("RGB")
    if alpha.getextrema() == (255, 255):
        return rgb
    white = Pillow.new("RGB", picture.size, (255, 255, 255))
    white.paste(rgb, mask=alpha)
    return white


def _from_sixteen_bit(picture: Pillow.Image) -> Pillow.Image:
    """Keep the high byte, as Pillow does for 16-bit RGB; its convert("L") would clip everything to white."""
    values = np.asarray(picture)
    grey = Pillow.fromarray((values >> 8).astype(np.uint8))
    key = picture.info.get("transparency")
    if not isinstance(key, int):
        return grey.convert("RGB")
    alpha = Pillow.fromarray(np.where(values == key, 0, 255).astype(np.uint8))
    return _over_white(Pillow.merge("LA", (grey, alpha)).convert("RGBA"))
