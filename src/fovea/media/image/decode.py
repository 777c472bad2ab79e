"""Encoded bytes to RGB pixels; the only file that lets Pillow decode what a stranger sent.

Order matters: header and limits first (`probe`), then the bytes that the pixels need and no others
(`formats`), then Pillow with exactly the one decoder that the header asked for. Whatever goes wrong inside
becomes InvalidImage; a picture that is only partly there is refused, never shown half grey.
XMP orientation and colour profiles are not read: neither does the reference implementation of any model.
"""

from __future__ import annotations

import io

from PIL import Image as Pillow
from PIL import (
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401  registers itself; else Pillow would import its forty other decoders for it
)

from fovea.core.errors import FoveaError, InvalidImage
from fovea.core.image import Image
from fovea.core.stage import stage
from fovea.media.image.colour import to_rgb
from fovea.media.image.formats import Format
from fovea.media.image.identity import identity_of_source
from fovea.media.image.probe import ImageHeader, check_still, format_of, probe, shown_size
from fovea.media.limits import MediaLimits

UPRIGHT: dict[int, Pillow.Transpose] = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}


def decode(data: bytes, limits: MediaLimits, identity: str | None = None) -> Image:
    """RGB pixels, upright, of a still image. identity: where `identify` has made it already.

    Raises InvalidImage and nothing else. CPU-bound: call in a thread.
    """
    with stage("image decode"):
        header = probe(data, limits)
        check_still(header, limits)
        kind = format_of(data)
        assert kind is not None  # probe has just found it
        picture = _upright_rgb(kind, kind.essence(data), header)
        return Image(identity or identify(data, header), header.width, header.height, picture.tobytes())


def identify(data: bytes, header: ImageHeader) -> str:
    """The identity that these bytes will have decoded. Reads all of them: call in a thread."""
    return identity_of_source(header.media_type, header.width, header.height, data)


def _upright_rgb(kind: Format, essence: bytes, header: ImageHeader) -> Pillow.Image:
    try:
        with Pillow.open(io.BytesIO(essence), formats=[kind.name]) as opened:
            turn = UPRIGHT.get(header.orientation)
            if shown_size(*opened.size, header.orientation) != (header.width, header.height):
                raise InvalidImage(
                    f"the {kind.name} is corrupt: its header contradicts itself about the size"
                )
            opened.load()
            picture = to_rgb(opened)
            return picture if turn is None else picture.transpose(turn)
    except FoveaError:
        raise
    except Exception as error:
        # Decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error, EOFError, MemoryError and
        # more for bad data; the list is theirs and changes, the meaning for the caller is one.
        raise InvalidImage(f"the {kind.name} can not be decoded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "its header is damaged"  # Pillow's text names a Python object
    if isinstance(error, MemoryError):
        return "not enough memory for its pixels"
    return (str(error) or type(error).__name__)[:200]
