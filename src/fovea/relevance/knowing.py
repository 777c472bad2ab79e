"""Three ways of knowing what in an image matters (after Vervaeke): by its content, by its salience, by what is asked.

Each gives a map over the cells of a texture, (rows, columns) in [0, 1], of one image at a time.

Propositional, knowing that: how much a cell holds; entropy of its luminance, and its variance at two scales.
Perspectival, what stands out from where one stands: differences between a cell and its surround.
Participatory, what question and image make of each other: the model's part, see coupling.py. Without a model, words of
the question choose among what the other two and the texture's channels know.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from fovea.relevance.texture import Bytes, Map, Texture, lab

LEVELS, STEP = 33, 16
"""Of a cell's histogram of luminance: how many, each of so many grey values, the middle one around the cell's mean."""
NOTHING, CHANCE = 0.04, 0.2
"""Differences below that, of a range of 1, are noise: a blank image has no content, however little is in it. CHANCE: of
entropies, which vary more than that among samples of the same noise."""
FAINT = 0.005
"""The same of strokes, whose edges are a small part of a cell."""
HUE = 12
"""Power of the likeness in hue: of a red, a third counts as orange, and of a blue half as purple."""
GRAIN = 6.0
"""In even noise the most salient cells reach two to three times the salience of the least; content stands out by more."""


def stretched(values: Map, least: float = NOTHING, grain: float = 0.0) -> Map:
    """To [0, 1] within the image: a fifth of its cells count as background, its highest fiftieth as full.

    grain: how much of the background's own value a difference has to reach, too, before it counts as full.
    """
    low, high = np.quantile(values, (0.2, 0.98))
    scale = max(float(high - low), least + grain * float(low))
    found: Map = np.clip((values - low) / scale, 0, 1).astype(np.float32)
    return found


def propositional(seen: Texture) -> Map:
    """How much is in each cell."""
    fine, coarse = _deviations(seen.luma, seen.cell)
    parts = (
        stretched(_entropy(seen.luma, seen.cell), CHANCE, 1),
        stretched(fine, grain=1),
        stretched(coarse, grain=1),
    )
    return ((parts[0] + parts[1] + parts[2]) / 3).astype(np.float32)


def perspectival(seen: Texture) -> Map:
    """How much each cell differs from what is around it, in colour and in its edges, at two scales."""
    channels = np.concatenate(
        (seen.channels[:, :, 3:6], seen["sobel"][:, :, None], seen["range"][:, :, None]), axis=2
    )
    found = np.zeros(seen.grid, np.float32)
    for centre, surround in ((0, 2), (1, 4)):
        difference = _box(channels, centre) - _box(channels, surround)
        found += np.sqrt(np.square(difference).sum(2))
    return stretched(found, grain=GRAIN)


def keywords(seen: Texture, question: str) -> Map:
    """What a question's words (English) ask for: text is edges on an even ground, a colour is near that colour, and
    other things are what is there at all."""
    found = [stretched(values, least) for values, least in wanted(seen, question)]
    if not found:
        return np.maximum(propositional(seen), perspectival(seen))
    highest: Map = np.max(found, axis=0).astype(np.float32)
    return highest


def wanted(seen: Texture, question: str) -> list[tuple[Map, float]]:
    """For everything that the words ask for, how much of it is in each cell, on a scale that is the same for all images,
    and what of it is noise."""
    found = [(rule(seen), least) for pattern, rule, least in _RULES if pattern.search(question)]
    found += [
        (_near(seen, rgb), NOTHING)
        for name, rgb in COLOURS.items()
        if re.search(rf"\b{name}\b", question, re.IGNORECASE)
    ]
    return found


def text_like(seen: Texture) -> Map:
    """Many edges for the range of luminance: strokes, rather than one border of two surfaces."""
    found: Map = seen["sobel"] * np.sqrt(seen["range"])
    return found


def _near(seen: Texture, rgb: tuple[int, int, int]) -> Map:
    """How much of a colour is in each cell: its likeness in hue, as far as the cell has any colour."""
    direction = lab(np.array(rgb, np.float32)[None] / 255)[0, 1:] / 255
    chroma = seen.channels[:, :, 4:6] - 0.5
    strength = np.hypot(chroma[..., 0], chroma[..., 1])
    size = float(np.hypot(*direction))
    if size < 0.02:
        level = float(lab(np.array(rgb, np.float32)[None] / 255)[0, 0]) / 100
        grey: Map = (1 - np.abs(seen["lightness"] - level)) * (1 - np.clip(4 * strength, 0, 1))
        return grey
    likeness = (chroma @ direction) / (size * np.maximum(strength, 1e-6))
    near: Map = (np.clip(likeness, 0, 1) ** HUE * strength).astype(np.float32)
    return near


def _deviations(luma: Bytes, cell: int) -> tuple[Map, Map]:
    """Standard deviations of luminance, of 1: within quarters of a cell's side, and between them."""
    rows, columns = luma.shape[0] // cell, luma.shape[1] // cell
    cuts = 4 if cell % 4 == 0 else 1
    size = cell // cuts
    sums = np.empty((2, rows * cuts, columns * cuts), np.float32)
    for row in range(rows * cuts):
        band = luma[row * size : (row + 1) * size].astype(np.float32) / np.float32(255)
        sums[0, row] = band.sum(0).reshape(-1, size).sum(1)
        sums[1, row] = np.square(band, out=band).sum(0).reshape(-1, size).sum(1)
    mean, square = sums / np.float32(size * size)
    within = np.maximum(square - mean * mean, 0)
    shape = rows, cuts, columns, cuts
    means = mean.reshape(shape)
    between = means.var(axis=(1, 3))
    return np.sqrt(within.reshape(shape).mean(axis=(1, 3))), np.sqrt(between)


def _entropy(luma: Bytes, cell: int) -> Map:
    """Of the histogram of luminance in each cell, in units of that of 16 equal levels.

    Levels are counted from the cell's mean: with fixed ones, a little noise around the border of two of them would be a lot.
    """
    rows, columns = luma.shape[0] // cell, luma.shape[1] // cell
    step = 2 if cell % 2 == 0 else 1
    side = cell // step
    small = luma.reshape(luma.shape[0] // step, step, -1, step)
    value = (small[:, 0, :, 0].astype(np.int32) + small[:, -1, :, -1]) >> 1
    middle = np.asarray(PIL.Image.fromarray(luma).reduce(cell)).astype(np.int32)
    first = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns) * (LEVELS * STEP)
    first += LEVELS * STEP // 2 - middle
    level = (value.reshape(rows, side, -1) + first.repeat(side, axis=1)[:, None]) // STEP
    counts = np.bincount(level.ravel(), minlength=rows * columns * LEVELS)
    share = counts.reshape(rows, columns, LEVELS).astype(np.float32) / np.float32(side * side)
    found: Map = -(share * np.log(np.maximum(share, 1e-9))).sum(2) / np.float32(np.log(16))
    return found


def _box(values: Map, reach: int) -> Map:
    """Means over squares of side 2 * reach + 1 around each cell, as far as they lie in the image; (rows, columns, ...)."""
    if not reach:
        return values
    rows, columns = values.shape[:2]
    sums = np.zeros((rows + 1, columns + 1, *values.shape[2:]), np.float64)
    sums[1:, 1:] = values.cumsum(0, dtype=np.float64).cumsum(1)
    top, left = (np.maximum(np.arange(size) - reach, 0) for size in (rows, columns))
    bottom, right = (np.minimum(np.arange(size) + reach + 1, size) for size in (rows, columns))
    total = sums[bottom][:, right] - sums[top][:, right] - sums[bottom][:, left] + sums[top][:, left]
    area = (bottom - top)[:, None] * (right - left)[None]
    found: Map = (total / area.reshape(rows, columns, *([1] * (values.ndim - 2)))).astype(np.float32)
    return found


def _whole_words(*words: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(words)})(?:s|es|ed|ing|ten)?\b", re.IGNORECASE)


COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30), "green": (30, 150, 50), "blue": (30, 70, 220), "yellow": (240, 220, 40),
    "orange": (245, 130, 20), "purple": (130, 40, 170), "pink": (245, 135, 195), "cyan": (50, 205, 220),
    "brown": (130, 80, 40), "black": (10, 10, 10), "white": (250, 250, 250),
}  # fmt: skip
_RULES: tuple[tuple[re.Pattern[str], Callable[[Texture], NDArray[np.float32]], float], ...] = (
    (
        _whole_words(
            "text", "read", "writ", "written", "word", "letter", "number", "digit", "character", "say", "code", "label",
            "name", "date", "amount", "total", "price",
        ),
        text_like,
        FAINT,
    ),
)  # fmt: skip
