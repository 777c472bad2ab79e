"""The interface of an image format: how to read its header, and which of its bytes the pixels need.

There are two reasons not to leave this to the decoder. Pillow may allocate the canvas (WebP) or inflate
metadata (PNG) when it opens a file, before Fovea has compared the size with its limits. And most defects of
image decoders concern metadata, which no model needs; `essence` removes it.
"""

from __future__ import annotations

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
