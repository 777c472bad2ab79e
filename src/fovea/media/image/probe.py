"""Reads the header of an image and enforces the limits, without decoding or allocating pixels.

Admission counts visual tokens from the sizes in the header. `FORMATS` lists the accepted formats, one module
each; TIFF, HEIC, AVIF, SVG and others are left out on purpose: each needs a large decoder for few images.
`describe` names other data, so that an error can say more than "invalid".
"""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.errors import InvalidImage
from fovea.media.image import bmp, gif, jpeg, png, webp
from fovea.media.image.base import SIDEWAYS, Format, IncompleteHeader
from fovea.media.limits import MediaLimits

FORMATS: tuple[Format, ...] = (png.FORMAT, jpeg.FORMAT, webp.FORMAT, gif.FORMAT, bmp.FORMAT)
ACCEPTED = "PNG, JPEG, WebP, GIF, BMP"
_SIGNATURE_BYTES = 16
_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"%PDF", "a PDF document; render the page to a PNG first"),
    (0, b"II*\0", "a TIFF image; convert it to PNG"),
    (0, b"MM\0*", "a TIFF image; convert it to PNG"),
    (4, b"ftypavif", "an AVIF image; convert it to PNG or JPEG"),
    (4, b"ftypheic", "a HEIC image; convert it to JPEG"),
    (4, b"ftypmif1", "a HEIF image; convert it to JPEG"),
    (4, b"ftyp", "an MP4 or QuickTime video"),
    (0, b"\x1aE\xdf\xa3", "a WebM or Matroska video"),
    (0, b"\0\0\x01\0", "an icon file"),
    (0, b"\0\0\0\x0cJXL ", "a JPEG XL image; convert it to PNG or JPEG"),
    (0, b"\xff\x0a", "a JPEG XL image; convert it to PNG or JPEG"),
    (0, b"\0\0\0\x0cjP  ", "a JPEG 2000 image; convert it to PNG or JPEG"),
    (0, b"8BPS", "a Photoshop file"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"\x1f\x8b", "gzip-compressed data"),
    (8, b"WAVE", "a WAV sound"),
    (0, b"ID3", "an MP3 sound"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the file it points to"),
)
_TEXTS: tuple[tuple[bytes, str], ...] = (
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<svg", "an SVG drawing; render it to a PNG first"),
    (b"<?xml", "an XML document or SVG drawing; render it to a PNG first"),
    (b"data:", "a data: URL inside the data"),
    (b"{", "JSON text"),
    (b"[", "JSON text"),
)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The facts in an image's header.

    width, height: pixels after EXIF orientation.
    mode: colours as stored in the file, by Pillow's names (L, RGB, RGBA, P, CMYK, I;16, ...).
    animated: whether there is more than one frame.
    orientation: 1 to 8 as in EXIF; 1 is upright.
    frames: number of frames in the bytes that were read.
    """

    media_type: str
    width: int
    height: int
    mode: str
    animated: bool
    orientation: int
    frames: int

    @property
    def pixels(self) -> int:
        return self.width * self.height


def probe(data: bytes, limits: MediaLimits) -> ImageHeader:
    """Read the header from a whole file or a prefix of it.

    Raises InvalidImage for a wrong type, a broken or incomplete header, and a size that breaks a limit.
    """
    try:
        return _read(data, limits)
    except IncompleteHeader:
        kind = format_of(data)
        raise InvalidImage(
            f"the {kind.name if kind else 'image'} is truncated: it ends within its header",
            code="image_truncated",
        ) from None


def peek(data: bytes, limits: MediaLimits) -> ImageHeader | None:
    """Read the header of a file that is still arriving; None if it is not complete yet.

    Raises InvalidImage as `probe` does.
    """
    try:
        return _read(data, limits)
    except IncompleteHeader:
        return None


def format_of(data: bytes) -> Format | None:
    head = data[:_SIGNATURE_BYTES]
    return next((kind for kind in FORMATS if kind.matches(head)), None)


def upright_size(width: int, height: int, orientation: int) -> tuple[int, int]:
    """Return width and height after the picture has been turned upright."""
    return (height, width) if orientation in SIDEWAYS else (width, height)


def check_size(width: int, height: int, limits: MediaLimits) -> None:
    """Raise InvalidImage if a picture of this size breaks a limit; the message names the limit."""
    size = f"the image is {width}x{height} pixels"
    if width < 1 or height < 1:
        raise InvalidImage(f"{size}; both sides must be at least 1")
    low, high = min(width, height), max(width, height)
    if low < limits.min_side:
        raise InvalidImage(
            f"{size}; accepted: at least {limits.min_side} on each side", code="image_too_small"
        )
    if high > limits.max_side:
        raise InvalidImage(f"{size}; accepted: at most {limits.max_side} on a side", code="image_too_large")
    if width * height > limits.max_pixels:
        raise InvalidImage(
            f"{size}, {width * height} in all; accepted: at most {limits.max_pixels}", code="image_too_large"
        )
    if high > low * limits.max_aspect_ratio:
        raise InvalidImage(
            f"{size}; accepted: an aspect ratio of at most {limits.max_aspect_ratio:g}:1",
            code="image_too_long",
        )


def check_still(header: ImageHeader, limits: MediaLimits) -> None:
    """Raise InvalidImage for an animation: to use only one of its frames would be a silent choice."""
    if header.animated and not limits.first_frame_of_animation:
        raise InvalidImage(
            f"the {header.media_type} is animated with {header.frames} frames; accepted: a still image",
            code="image_animated",
        )


def _read(data: bytes, limits: MediaLimits) -> ImageHeader:
    kind = format_of(data)
    if kind is None:
        raise InvalidImage(
            f"the data is not an image of an accepted type but {describe(data)}; accepted: {ACCEPTED}"
            if data
            else f"the data is empty; accepted: {ACCEPTED}",
            code="unsupported_image_type",
        )
    facts = kind.scan(data)
    width, height = upright_size(facts.width, facts.height, facts.orientation)
    check_size(width, height, limits)
    frames = facts.frames
    return ImageHeader(kind.media_type, width, height, facts.mode, frames > 1, facts.orientation, frames)


def describe(data: bytes) -> str:
    """Return a noun phrase: "an HTML page", "plain text", "unknown data that begins with 0x00ff..."."""
    if not data:
        return "empty"
    for offset, signature, name in _SIGNATURES:
        if data.startswith(signature, offset):
            return name
    start = data[:512].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for prefix, name in _TEXTS:
        if start.startswith(prefix):
            return name
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in data[:64]):
        return "plain text"
    return f"unknown data that begins with 0x{data[:8].hex()}"
