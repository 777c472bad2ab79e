"""Decodes image files to RGB pixels. No other module lets Pillow decode data from clients.

The order matters: first header and limits (`probe`), then extraction of only those bytes that the pixels need
(`formats`), then Pillow with only the decoder of the header's format. Every failure becomes InvalidImage; an
incomplete picture is refused instead of decoded half grey.
Colour profiles are ignored, because the models' reference implementations ignore them, too.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image as Pillow
from PIL import (
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401  registers its decoder; without it Pillow would import its forty other ones
)

from fovea.core.errors import FoveaError, InvalidImage
from fovea.core.image import Image, content_identity
from fovea.core.stage import stage
from fovea.media.image.colour import to_rgb, without_empty_alpha
from fovea.media.image.formats import Format
from fovea.media.image.probe import ImageHeader, check_still, format_of, probe, upright_size
from fovea.media.limits import MediaLimits

BAND_BYTES = 1 << 20
"""Size of a band of rows, about, whose colours are converted at once."""
_TURNS: dict[int, Pillow.Transpose] = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}


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
        turn = _TURNS.get(header.orientation)
        if upright_size(*file.size, header.orientation) != (header.width, header.height):
            raise InvalidImage(f"the {kind.name} is corrupt: its header contradicts itself about the size")
        file.load()
        picture = without_empty_alpha(file)
        return picture if turn is None else picture.transpose(turn)


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
