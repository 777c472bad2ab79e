"""How much an image is to a vision tower, in rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisualShape:
    """patches: rows of the patch embedding. rows: of the blocks (a class token is one more). projected: of the projector.

    hidden: width of the blocks. pairs: of rows that attend to each other, summed over all blocks.
    """

    patches: int
    rows: int
    projected: int
    hidden: int
    pairs: int
