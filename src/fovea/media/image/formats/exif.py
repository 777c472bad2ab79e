"""Reads the EXIF orientation, the only tag that changes where pixels are. All other tags are ignored."""

from __future__ import annotations

import struct

_ORIENTATION = 0x0112
_BYTE_ORDERS = {b"II": "<", b"MM": ">"}
_VALUE_KINDS = {3: "H", 4: "I"}


MAX_BYTES = 1 << 16
"""Most bytes of an EXIF block that are read. A block in a JPEG cannot be larger, so no writer needs more."""

SIDEWAYS = range(5, 9)
"""Orientations that exchange width and height."""


def orientation(blob: bytes) -> int:
    """Return the orientation, 1 to 8 (EXIF 2.3, section 4.6.4 A).

    If it is unreadable, return 1 (upright), as viewers do. The time is bounded by MAX_BYTES: a directory may
    claim 65,535 entries, but only those within the block are read.
    """
    tiff = blob[:MAX_BYTES].removeprefix(b"Exif\0\0")
    order = _BYTE_ORDERS.get(tiff[:2])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
        (entries,) = struct.unpack_from(f"{order}H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(f"{order}HH", tiff, entry)
            if tag == _ORIENTATION:
                (value,) = struct.unpack_from(f"{order}{_VALUE_KINDS.get(kind, 'H')}", tiff, entry + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1
