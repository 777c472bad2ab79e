"""BMP: a file header, an info header, rows of pixels.

Run-length encoded files are refused: Pillow decodes them byte by byte in Python, so a hostile file takes
minutes.
"""

from __future__ import annotations

import struct

from fovea.core.errors import InvalidImage
from fovea.media.image.base import Facts, Format, IncompleteHeader

_MODES = {1: "P", 4: "P", 8: "P", 16: "RGB", 24: "RGB", 32: "RGB"}
_UNCOMPRESSED = (0, 3, 6)  # BI_RGB, BI_BITFIELDS, BI_ALPHABITFIELDS


def _matches(head: bytes) -> bool:
    return head[:2] == b"BM" and head[15:16] == b"\0" and head[14] in (12, 40, 52, 56, 64, 108, 124)


def _scan(data: bytes) -> Facts:
    if len(data) < 34:
        raise IncompleteHeader
    if data[14] == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
        compression = 0
    else:
        width, height, _, bits, compression = struct.unpack_from("<iiHHI", data, 18)
    if bits not in _MODES:
        raise InvalidImage(f"the BMP has {bits} bits per pixel; accepted: {', '.join(map(str, _MODES))}")
    if compression not in _UNCOMPRESSED:
        raise InvalidImage(f"the BMP is compressed (kind {compression}); accepted: uncompressed, or a PNG")
    return Facts(max(0, width), abs(height), _MODES[bits])  # a negative height means that rows go top down


def _essence(data: bytes) -> bytes:
    return data


FORMAT = Format("BMP", "image/bmp", _matches, _scan, _essence)
