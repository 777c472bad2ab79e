"""Ways of knowing which cells of an image matter: by content, by salience, and by what the question is about.

They are named after Vervaeke. Each way is a map over the cells of one image's texture, (rows, columns) in
[0, 1].

Propositional: how much a cell contains, by the entropy of its luminance and the variance of it at two scales.
Perspectival: how much a cell stands out, by the differences between its colours and those around it.
Participatory: how much the question is about a cell, by the model's own attention (`engine.reduce.look`).
`participatory` carries it from the view that the model looked at to all cells, and along lines of text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from fovea.relevance.texture import Bytes, Map, Mask, Texture, lab

LEVELS, STEP = 33, 16
"""A cell's histogram of luminance has LEVELS bins of STEP grey values each. The middle bin is centred on the
cell's mean."""
NOISE, ENTROPY_NOISE = 0.04, 0.2
"""Differences below NOISE, on a scale of 1, are taken for noise. Without it the strongest noise of a blank
image would be its content. ENTROPY_NOISE is the limit for entropies, which vary more between samples of the
same noise."""
STROKE_NOISE = 0.005
"""The limit of noise for strokes of text. It is lower, because their edges are a small part of a cell."""
HUE_POWER = 12
"""Exponent of the similarity in hue. With it a third of a red counts as orange, and half of a blue as
purple."""
PLAIN = 1 / 255
"""A cell is plain if its luminance deviates by less than one grey value within its parts."""
STROKES = 0.03
"""Least density of strokes (`text_like`) of a cell with text. Shapes without text have a third of it."""
ALONG, ACROSS = 0.95, 0.5
"""Shares of a value that the next cell of a line gets, and the cell above or below."""
SMALLEST = 1e-3
"""Values that grow by less than this have grown enough."""
GRAIN = 6.0
"""Least contrast of salience, as a multiple of the background's. In even noise the most salient cells have
two to three times the salience of the least salient ones; content has more than that."""


def stretch(values: Map, least: float = NOISE, grain: float = 0.0) -> Map:
    """Scale a map to [0, 1] within the image: its quantile 0.2 becomes 0, its quantile 0.98 becomes 1.

    least: the smallest difference between the two quantiles that is scaled up to 1.
    grain: a multiple of the lower quantile that is added to `least`, for values whose noise grows with the
        background.
    """
    low, high = np.quantile(values, (0.2, 0.98))
    scale = max(float(high - low), least + grain * float(low))
    unit: Map = np.clip((values - low) / scale, 0, 1).astype(np.float32)
    return unit


def propositional(texture: Texture) -> Map:
    """How much each cell contains, (rows, columns) in [0, 1]."""
    fine, coarse = deviations_of_cells(texture.luma, texture.cell)
    parts = (
        stretch(entropy_of_cells(texture.luma, texture.cell), ENTROPY_NOISE, 1),
        stretch(fine, grain=1),
        stretch(coarse, grain=1),
    )
    return ((parts[0] + parts[1] + parts[2]) / 3).astype(np.float32)


def perspectival(texture: Texture) -> Map:
    """How much each cell differs from its surround, (rows, columns) in [0, 1].

    It compares colour, edges and range of luminance, at two scales.
    """
    channels = np.concatenate(
        (texture.channels[:, :, 3:6], texture["sobel"][:, :, None], texture["range"][:, :, None]), axis=2
    )
    salience = np.zeros(texture.grid, np.float32)
    for centre, surround in ((0, 2), (1, 4)):
        difference = box_means(channels, centre) - box_means(channels, surround)
        salience += np.sqrt(np.square(difference).sum(2))
    return stretch(salience, grain=GRAIN)


def keyword_amounts(texture: Texture, question: str) -> list[tuple[Map, float]]:
    """Amount in each cell, and limit of noise, of each thing that key words of the question name.

    The scale is the same for all images, so that images can be compared.
    """
    amounts = [(rule(texture), least) for pattern, rule, least in _RULES if pattern.search(question)]
    amounts += [
        (_near(texture, rgb), NOISE)
        for name, rgb in COLOURS.items()
        if re.search(rf"\b{name}\b", question, re.IGNORECASE)
    ]
    return amounts


def text_like(texture: Texture) -> Map:
    """Density of edges times the root of the range: high for strokes, low for a border of two surfaces."""
    strokes: Map = texture["sobel"] * np.sqrt(texture["range"])
    return strokes


def _near(texture: Texture, rgb: tuple[int, int, int]) -> Map:
    """How much of a colour is in each cell: similarity in hue times chroma; for greys, similar lightness."""
    direction = lab(np.array(rgb, np.float32)[None] / 255)[0, 1:] / 255
    chroma = texture.channels[:, :, 4:6] - 0.5
    strength = np.hypot(chroma[..., 0], chroma[..., 1])
    size = float(np.hypot(*direction))
    if size < 0.02:
        level = float(lab(np.array(rgb, np.float32)[None] / 255)[0, 0]) / 100
        grey: Map = (1 - np.abs(texture["lightness"] - level)) * (1 - np.clip(4 * strength, 0, 1))
        return grey
    similarity = (chroma @ direction) / (size * np.maximum(strength, 1e-6))
    near: Map = (np.clip(similarity, 0, 1) ** HUE_POWER * strength).astype(np.float32)
    return near


def readable_at(texture: Texture) -> Map:
    """Resolution per side at which each cell can still be read, as a share of the native one: 1 or a half.

    Small letters vary within small parts of a cell, and are lost at half the resolution. Large letters and
    shapes vary between these parts, and are not.
    """
    fine, coarse = deviations_of_cells(texture.luma, texture.cell)
    # The two of a plain cell differ by rounding alone.
    return np.where(fine > np.maximum(coarse, PLAIN), 1.0, 0.5).astype(np.float32)


def deviations_of_cells(luma: Bytes, cell: int) -> tuple[Map, Map]:
    """Standard deviations of luminance within and between 4x4 parts of each cell, both (rows, columns).

    The scale of luminance is 1.
    A cell whose side is not a multiple of 4 is one part.
    """
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


def entropy_of_cells(luma: Bytes, cell: int) -> Map:
    """Entropy of the histogram of luminance in each cell, (rows, columns).

    The unit is the entropy of 16 equal bins. Bins are placed around the cell's mean. With fixed bins, a
    little noise around the border of two of them would have a high entropy.
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
    entropy: Map = -(share * np.log(np.maximum(share, 1e-9))).sum(2) / np.float32(np.log(16))
    return entropy


def box_means(values: Map, reach: int) -> Map:
    """Means over the square of side 2 * reach + 1 around each cell, inside the image; (rows, columns,
    ...)."""
    if not reach:
        return values
    rows, columns = values.shape[:2]
    sums = np.zeros((rows + 1, columns + 1, *values.shape[2:]), np.float64)
    sums[1:, 1:] = values.cumsum(0, dtype=np.float64).cumsum(1)
    top, left = (np.maximum(np.arange(size) - reach, 0) for size in (rows, columns))
    bottom, right = (np.minimum(np.arange(size) + reach + 1, size) for size in (rows, columns))
    total = sums[bottom][:, right] - sums[top][:, right] - sums[bottom][:, left] + sums[top][:, left]
    area = (bottom - top)[:, None] * (right - left)[None]
    means: Map = (total / area.reshape(rows, columns, *([1] * (values.ndim - 2)))).astype(np.float32)
    return means


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
            "text", "read", "writ", "written", "word", "letter", "number", "digit", "character", "say",
            "code", "label", "name", "date", "amount", "total", "price",
        ),
        text_like,
        STROKE_NOISE,
    ),
)  # fmt: skip


def participatory(asked: Map, texture: Texture) -> Map:
    """How much the question is about each cell, (rows, columns) in [0, 1].

    A model that is about to read a line attends to its beginning. So the line counts as a whole.

    asked: attention to each token of a view of the whole image, (rows, columns) of that view.
    """
    known = np.nan_to_num(asked, nan=0.0, posinf=0.0)
    cells = resample(known / max(float(known.max()), 1e-9), texture.grid)
    return along_lines(cells / max(float(cells.max()), 1e-9), text_like(texture) > STROKES)


def along_lines(values: Map, strokes: Mask) -> Map:
    """Carry values from cell to cell of a line of text, with a part of them to the lines above and below.

    values: (rows, columns). strokes: whether a cell has strokes like those of text.
    """
    # One cell without strokes is the space between two words.
    line = strokes.copy()
    line[:, 1:-1] |= strokes[:, :-2] & strokes[:, 2:]
    while True:
        wide = np.pad(values, 1)
        beside = np.maximum(wide[1:-1, :-2], wide[1:-1, 2:])
        stacked = np.maximum(wide[:-2, 1:-1], wide[2:, 1:-1])
        grown = np.maximum(values, line * np.maximum(ALONG * beside, ACROSS * stacked))
        if np.abs(grown - values).max() < SMALLEST:
            return values.astype(np.float32)
        values = grown


def resample(table: Map, grid: tuple[int, int]) -> Map:
    """Interpolate values of the tokens of a view of the whole bilinearly to the cells of the full grid.

    table: rows and columns of the view.
    grid: rows and columns of the full grid; the result has this shape.
    """
    for axis, size in enumerate(grid):
        count = table.shape[axis]
        at = np.clip((np.arange(size) + 0.5) * (count / size) - 0.5, 0, count - 1)
        low = np.floor(at).astype(np.int64)
        high = np.minimum(low + 1, count - 1)
        part = (at - low).astype(np.float32)
        part = part[:, None] if axis == 0 else part[None]
        table = table.take(low, axis) * (1 - part) + table.take(high, axis) * part
    return table.astype(np.float32)
