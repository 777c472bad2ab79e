"""Positions of prompt tokens, for models with three coordinates per position (M-RoPE) and with one.

With M-RoPE, text advances all three coordinates together. The tokens of an image share one time and spread
over height and width on the merged grid. The text after an image continues after the larger of the two sides,
not after the token count (arXiv 2409.12191, section 2.1). The frame groups of a video all begin at the
position of the video and differ in time. Tokens that pruning left out leave holes.

For a reduced image (`ImageSpan.full_tokens`) only the encoder finds out which tokens remain. Until then all
of them have the position at which the image begins; `place` moves them later. The position of the text after
it does not depend on that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fovea.engine.sequence import ImageSpan


def mrope_positions(length: int, spans: Sequence[ImageSpan], merge: int) -> tuple[NDArray[np.int64], int]:
    """Return the positions of a prompt for M-RoPE, and the offset from index to position of later tokens.

    spans: images and frame groups, in the order of the prompt.
    merge: patches per side of a visual token.
    Returns positions of shape (3, length), and the offset.
    """
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
    # The time of a long video may exceed the position of the text after it. Generated tokens continue after
    # the text.
    delta = cursor + (length - token) - length
    return positions, delta


def plain_positions(length: int, spans: Sequence[ImageSpan]) -> tuple[NDArray[np.int64], int]:
    """Return the positions of a prompt for models with one coordinate, and the offset of later tokens.

    The positions, of shape (length,), are those of a prompt in which no visual token is left out.
    """
    positions = np.arange(length, dtype=np.int64)
    left_out = 0
    for span in spans:
        if span.full_tokens:
            positions[span.start : span.end] = span.start + left_out
            left_out += span.full_tokens - span.tokens
            positions[span.end :] = np.arange(span.end, length) + left_out
    return positions, left_out


def place(positions: NDArray[np.int64], span: ImageSpan, places: NDArray[np.int64]) -> None:
    """Move the tokens of a reduced image from the position at which it begins to their own.

    Changes `positions`.

    positions: of the whole prompt, (3, length) or (length,).
    places: the tokens' places in the image: rows and columns, (tokens, 2), or numbers, (tokens, 1).
    """
    begin = positions[..., span.start].copy()
    if positions.ndim == 1:
        positions[span.start : span.end] = begin + places[:, 0]
    else:
        positions[1:, span.start : span.end] = begin[1:, None] + places.T
