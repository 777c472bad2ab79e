"""Reads the header of an image and enforces the limits, without decoding or allocating pixels.

Admission counts visual tokens from the sizes in the header.
"""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.errors import InvalidImage
from fovea.media.image.formats import ACCEPTED, FORMATS, Format, IncompleteHeader
from fovea.media.image.formats.exif import SIDEWAYS
from fovea.media.image.sniff import describe
from fovea.media.limits import MediaLimits

_SIGNATURE_BYTES = 16


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
    return ImageHeader(
        kind.media_type, width, height, facts.mode, facts.frames > 1, facts.orientation, facts.frames
    )
