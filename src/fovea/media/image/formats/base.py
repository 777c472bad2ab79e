"""What Fovea itself knows of an image format: its header and which of its bytes the pixels need.

Two reasons not to leave this to the decoder. Opening a file with Pillow may already allocate its canvas (WebP)
or inflate its metadata (PNG), before any limit of ours was compared with its size. And most trouble with image
decoders sits in metadata that no model ever sees; `essence` leaves it behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fovea.core.errors import InvalidImage

MAX_PARTS = 100_000
"""Chunks or segments of one file. Real files have a few thousand; walking them holds the interpreter."""


class NeedMore(Exception):
    """The header goes on beyond the bytes at hand: fetch more, or call it truncated."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A header as stored: sides before orientation. `frames` and `orientation` as far as the bytes at hand go."""

    width: int
    height: int
    mode: str
    frames: int = 1
    orientation: int = 1


@dataclass(frozen=True, slots=True)
class Format:
    """matches: do these first bytes (16 at least) belong to this format?
    scan: the facts in these bytes, a prefix or the whole; raises NeedMore when the sides are not in them.
    essence: the bytes that decide the first frame's pixels; raises InvalidImage when some are missing.
    """

    name: str
    media_type: str
    matches: Callable[[bytes], bool]
    scan: Callable[[bytes], Facts]
    essence: Callable[[bytes], bytes]


def truncated(name: str, missing: str) -> InvalidImage:
    return InvalidImage(f"the {name} is truncated: it ends before {missing}", code="image_truncated")


def fragmented(name: str) -> InvalidImage:
    return InvalidImage(f"the {name} is cut into more than {MAX_PARTS} parts; re-encode it")
