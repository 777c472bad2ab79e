"""The interface of an image format: how to read its header, and which of its bytes the pixels need.

There are two reasons not to leave this to the decoder. Pillow may allocate the canvas (WebP) or inflate
metadata (PNG) when it opens a file, before Fovea has compared the size with its limits. And most defects of
image decoders concern metadata, which no model needs; `essence` removes it.

Orientation is the only metadata that changes where pixels are. EXIF states it, and XMP does if EXIF has no
such tag. This is the rule of Pillow's `exif_transpose`, and so of the models' reference implementations.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from fovea.core.errors import InvalidImage

MAX_PARTS = 20_000
"""Most chunks or blocks of a file.

Real files have a few thousand: a PNG of 20 MiB in chunks of 8 KiB has 2,560. Each costs a turn of a Python
loop, which blocks all other threads of the process.
"""


class IncompleteHeader(Exception):
    """The header is longer than the bytes at hand: more must be fetched, or the file is truncated."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts in a header as it is stored.

    width, height: pixels before orientation.
    mode: colours by Pillow's names.
    frames, orientation: as far as the bytes at hand contain them.
    """

    width: int
    height: int
    mode: str
    frames: int = 1
    orientation: int = 1


@dataclass(frozen=True, slots=True)
class Format:
    """One image format.

    name: Pillow's name of the format.
    matches: tells from the first bytes of a file (at least 16) whether it has this format.
    scan: reads the facts from a file or a prefix; raises IncompleteHeader if width and height are not in it.
    essence: returns only the bytes that determine the first frame's pixels; raises InvalidImage if some are
        missing.
    """

    name: str
    media_type: str
    matches: Callable[[bytes], bool]
    scan: Callable[[bytes], Facts]
    essence: Callable[[bytes], bytes]


def truncation_error(name: str, missing: str) -> InvalidImage:
    return InvalidImage(f"the {name} is truncated: it ends before {missing}", code="image_truncated")


def fragmentation_error(name: str, most: int = MAX_PARTS) -> InvalidImage:
    return InvalidImage(f"the {name} is cut into more than {most} parts; re-encode it")


_ORIENTATION = 0x0112
_BYTE_ORDERS = {b"II": "<", b"MM": ">"}
_VALUE_KINDS = {3: "H", 4: "I", 8: "h", 9: "i"}
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')

MAX_EXIF_BYTES = 1 << 16
"""Most bytes of an EXIF block that are read. A block in a JPEG cannot be larger, so no writer needs more."""

MAX_XMP_BYTES = 1 << 20
"""Most bytes of an XMP document that are searched."""

SIDEWAYS = range(5, 9)
"""Orientations that exchange width and height."""


def upright_by(block: bytes | None, xmp: bytes = b"") -> int:
    """Return the orientation, 1 to 8, of a file with this EXIF block and this XMP document.

    An orientation that is unreadable or does not exist counts as 1 (upright), as in viewers.
    """
    stated = 0 if block is None else orientation(block)
    if not stated:
        match = _XMP_ORIENTATION.search(xmp, 0, MAX_XMP_BYTES)
        stated = int(match[1]) if match else 1
    return stated if 1 <= stated <= 8 else 1


def orientation(block: bytes) -> int:
    """Return the orientation that an EXIF block states, 1 to 8 (EXIF 2.3, section 4.6.4 A); 0: none.

    If it is unreadable, return 1. The time is bounded by MAX_EXIF_BYTES: a directory may claim 65,535
    entries, but only those within the block are read.
    """
    tiff = block[:MAX_EXIF_BYTES]
    tiff = tiff.removeprefix(b"Exif\0\0").removeprefix(b"Exif\0\0")  # some writers repeat it
    order = _BYTE_ORDERS.get(tiff[:2])
    if order is None:
        return 0
    try:
        (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
        (entries,) = struct.unpack_from(f"{order}H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(f"{order}HH", tiff, entry)
            if tag == _ORIENTATION:
                if kind not in _VALUE_KINDS:
                    return 1
                (value,) = struct.unpack_from(f"{order}{_VALUE_KINDS[kind]}", tiff, entry + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 0
