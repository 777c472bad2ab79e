"""The amount of computation that an image is for a vision tower, counted in rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisualShape:
    """Numbers of rows that each stage of a vision tower computes for one image.

    patches: rows of the patch embedding.
    rows: rows of the blocks; a class token is one more.
    projector_rows: rows of the projector.
    hidden: width of the blocks.
    pairs: pairs of rows that attend to each other, summed over all blocks.
    merged_rows: rows of the modules after a merge of rows inside the tower, which
        `VisionLanguageModel.merged_modules` returns; 0: the tower has no merge.
    """

    patches: int
    rows: int
    projector_rows: int
    hidden: int
    pairs: int
    merged_rows: int = 0
