"""Dense targets of pages: what can be read from each patch on, up to `REACH` characters along the line."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fovea.evaluation.documents.page import Word
from fovea.evaluation.documents.scan import Affine

REACH = 4
"""Characters that are predicted from each patch on."""
CHARACTERS = " " + "".join(map(chr, range(33, 127))) + "£€"
NOTHING, OTHER, END = 0, len(CHARACTERS) + 1, len(CHARACTERS) + 2
CLASSES = len(CHARACTERS) + 3
"""Classes of a character: none starts in the patch, one of CHARACTERS, any other, the end of the line."""
NUMBER = {character: index + 1 for index, character in enumerate(CHARACTERS)}
FLAGS = 4
"""Classes of a patch's flag: no character starts in it; characters do; a word does; a run of words does."""
PATCH = 16
WIDEST_SPACE = 0.75
"""The widest space within a run of words, as a multiple of the height of its line's box."""
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Glyphs:
    """All characters of a page, in the order of the text, with spaces and ends of runs between them.

    codes: class of each, (n,).
    points: left edge and middle height of each, (n, 2) in pixels.
    flags: 1 for a character, 2 for the first of a word, 3 for the first of a run, 0 for spaces and ends,
        (n,).
    """

    codes: Index
    points: NDArray[np.float32]
    flags: Index


def glyphs(words: tuple[Word, ...]) -> Glyphs:
    """The characters of a page's words."""
    codes: list[int] = []
    points: list[tuple[float, float]] = []
    flags: list[int] = []
    before: Word | None = None
    for word in words:
        joined = before is not None and same_run(before, word)
        if before is not None:
            codes.append(NUMBER[" "] if joined else END)
            points.append((before.box[2], before.middle))
            flags.append(0)
        for index, (character, x) in enumerate(zip(word.text, word.starts, strict=True)):
            codes.append(NUMBER.get(character, OTHER))
            points.append((x, word.middle))
            flags.append(1 if index else 2 if joined else 3)
        before = word
    codes.append(END)
    points.append((before.box[2], before.middle) if before else (0.0, 0.0))
    flags.append(0)
    return Glyphs(np.array(codes, np.int64), np.array(points, np.float32), np.array(flags, np.int64))


def same_run(left: Word, right: Word) -> bool:
    """Whether a word follows another one in a run of words."""
    height = left.box[3] - left.box[1]
    near = abs(left.middle - right.middle) < 0.3 * height
    return near and -0.3 * height < right.box[0] - left.box[2] < WIDEST_SPACE * height


def dense(page: Glyphs, affine: Affine, size: tuple[int, int]) -> dict[str, Index]:
    """The targets of a picture that shows a part of a page.

    affine: maps the page's points to the picture's.
    size: width and height of the picture, multiples of 2 patches.

    Returns "text", (tokens, 4, REACH), and "flag", (tokens, 4), for the patches of each token in merge order.
    A target of -1 is not predicted.
    """
    width, height = size
    a, b, c, d, e, f = affine
    x = a * page.points[:, 0] + b * page.points[:, 1] + c
    y = d * page.points[:, 0] + e * page.points[:, 1] + f
    columns, rows = width // PATCH, height // PATCH
    column, row = np.floor(x / PATCH).astype(np.int64), np.floor(y / PATCH).astype(np.int64)
    inside = (x >= 0) & (column < columns) & (y >= 0) & (row < rows)
    text = np.full((rows, columns, REACH), -1, np.int64)
    text[..., 0] = NOTHING
    flag = np.zeros((rows, columns), np.int64)
    starts = np.flatnonzero(inside & (page.flags > 0))
    if len(starts):
        # Written in reverse order, so that the first character of each patch stays.
        starts = starts[::-1]
        at = row[starts], column[starts]
        reach = starts[:, None] + np.arange(REACH)
        last = len(page.codes) - 1
        codes = page.codes[np.minimum(reach, last)]
        shown = inside[np.minimum(reach, last)]
        ended = np.cumsum(codes == END, axis=1)
        codes = np.where((ended > 1) | ((ended == 1) & (codes != END)), -1, codes)
        cut = np.cumsum(~shown & (codes != END), axis=1) > 0
        text[at] = np.where(cut, -1, codes)
        flag[at] = page.flags[starts]
        np.maximum.at(flag, at, page.flags[starts])
    return {"text": _merge(text), "flag": _merge(flag)}


def _merge(grid: Index) -> Index:
    """Regroup patches (rows, columns, ...) by token, (rows * columns / 4, 4, ...)."""
    rows, columns, *rest = grid.shape
    grid = grid.reshape(rows // 2, 2, columns // 2, 2, *rest).swapaxes(1, 2)
    return grid.reshape(rows * columns // 4, 4, *rest)
