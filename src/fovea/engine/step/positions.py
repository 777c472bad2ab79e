"""Where each prompt token stands, for models whose positions have three coordinates (M-RoPE).

Text advances all three coordinates together. An image's tokens share one time and spread over height and width on the
merged grid; text goes on after the larger of the two sides, not after the token count (arXiv 2409.12191, section 2.1).
A video's frame groups begin where the video began and differ in time; tokens that pruning left out leave holes.

Of a reduced image (`ImageSpan.full_tokens`) only the encoder will know which tokens there are: until then all of them stand where
the image begins, and `place` moves them. Where text goes on does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fovea.engine.sequence import ImageSpan


def mrope_positions(length: int, spans: Sequence[ImageSpan], merge: int) -> tuple[NDArray[np.int64], int]:
    """Positions (3, length) of a prompt, and what to add to a later token's index to get its position."""
    positions = np.empty((3, length), dtype=np.int64)
    cursor = token = 0
    for span in spans:
        text = span.start - token
        positions[:, token : span.start] = np.arange(cursor, cursor + text)
        cursor += text
        time, height, width = span.grid[0], span.grid[1] // merge, span.grid[2] // merge
        grid = np.indices((time, height, width)).reshape(3, -1) + cursor
        grid[0] += span.time
        if span.full_tokens:
            positions[:, span.start : span.end] = cursor
        else:
            positions[:, span.start : span.end] = (
                grid if span.kept_cells is None else grid[:, list(span.kept_cells)]
            )
        if not span.has_more:
            cursor += max(height, width)
        token = span.end
    positions[:, token:] = np.arange(cursor, cursor + length - token)
    # The time of a long video may have run ahead of the text that follows it; what is generated goes on after the text.
    delta = cursor + (length - token) - length
    return positions, delta


def plain_positions(length: int, spans: Sequence[ImageSpan]) -> tuple[NDArray[np.int64], int]:
    """The same for models whose positions are one number: (length,), as if no token had been left out."""
    positions = np.arange(length, dtype=np.int64)
    left_out = 0
    for span in spans:
        if span.full_tokens:
            positions[span.start : span.end] = span.start + left_out
            left_out += span.full_tokens - span.tokens
            positions[span.end :] = np.arange(span.end, length) + left_out
    return positions, left_out


def place(positions: NDArray[np.int64], span: ImageSpan, places: NDArray[np.int64]) -> None:
    """Move the tokens of a reduced image from where it begins to their places: (tokens, 2) rows and columns, or (tokens, 1)
    numbers; in `positions`' place."""
    begin = positions[..., span.start].copy()
    if positions.ndim == 1:
        positions[span.start : span.end] = begin + places[:, 0]
    else:
        positions[1:, span.start : span.end] = begin[1:, None] + places.T
