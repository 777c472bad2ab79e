"""Composes random scenes: which items and labels a scene has, and where they are.

An item lies inside its cell of the 3x3 grid, away from the cell's borders, so that no answer about a place is
ambiguous. A row with a label holds no items.
"""

from __future__ import annotations

import math
from random import Random

from fovea.evaluation.scenes.draw import FONTS, text_width
from fovea.evaluation.scenes.scene import (
    CODE_CHARACTERS,
    COLOUR_NAMES,
    COLOURS,
    RGB,
    SHAPES,
    Background,
    Item,
    Label,
    Scene,
)

MIN_SIDE, MAX_SIDE = 128, 896
MIN_TEXT, MAX_TEXT = 14, 64
MIN_ITEM = 14.0
_DARK_ENOUGH = ("red", "blue", "purple", "green")
_LIGHT_ENOUGH = ("yellow", "cyan", "pink", "orange")


def random_size(rng: Random) -> tuple[int, int]:
    """Width and height in pixels, each in [128, 896]. Most are small; a fifth are not multiples of 32."""
    band = rng.random()
    low, high = (4, 8) if band < 0.6 else (8, 16) if band < 0.85 else (16, 28)
    sides = [32 * rng.randint(low, high) for _ in range(2)]
    if rng.random() < 0.2:
        sides = [min(MAX_SIDE, max(MIN_SIDE, side + rng.randint(-15, 15))) for side in sides]
    return sides[0], sides[1]


def _jitter(rng: Random, rgb: RGB, amount: int) -> RGB:
    red, green, blue = (min(255, max(0, channel + rng.randint(-amount, amount))) for channel in rgb)
    return red, green, blue


def random_background(rng: Random) -> tuple[Background, bool]:
    """A random background, and whether it is dark."""
    dark = rng.random() < 0.35
    grey = rng.randint(8, 52) if dark else rng.randint(212, 255)
    start = _jitter(rng, (grey, grey, grey), 6)
    end = _jitter(rng, start, 14) if rng.random() < 0.4 else start
    noise = rng.randint(2, 10) if rng.random() < 0.3 else 0
    return Background(start, end, rng.random() < 0.5, noise, rng.randrange(2**31)), dark


def random_code(rng: Random, length: int | None = None) -> str:
    """A code of `length` characters without equal neighbours. None: 2 to 6 characters."""
    code = ""
    for _ in range(length or rng.randint(2, 6)):
        code += rng.choice([c for c in CODE_CHARACTERS if c != code[-1:]])
    return code


def place_label(
    rng: Random, width: int, height: int, row: int, dark: bool, code: str, capitals: int | None = None
) -> Label:
    """A label with the text `code` at a random place of its row.

    capitals: height of its capital letters in pixels; None: random. A text that is too wide is made smaller.
    """
    face = rng.choice(FONTS)
    size = capitals
    if size is None:
        limit = max(MIN_TEXT, min(MAX_TEXT, int(height / 3 * 0.6)))
        size = round(math.exp(rng.uniform(math.log(MIN_TEXT), math.log(limit))))
    tracking = round(rng.uniform(0.04, 0.3) * size)
    while size > 8 and text_width(code, face, size, tracking) > 0.9 * width:
        size -= 1
        tracking = min(tracking, round(0.12 * size))
    margin = max(2.0, 0.03 * width)
    x = rng.uniform(margin, width - margin - text_width(code, face, size, tracking))
    top, slack = row * height / 3, height / 3 - size
    baseline = round(top + size + slack * rng.uniform(0.15, 0.85))
    if rng.random() < 0.25:
        rgb = _jitter(rng, COLOURS[rng.choice(_LIGHT_ENOUGH if dark else _DARK_ENOUGH)], 10)
    else:
        grey = rng.randint(215, 255) if dark else rng.randint(0, 45)
        rgb = (grey, grey, grey)
    return Label(code, row, face, size, float(round(x)), float(baseline), float(tracking), rgb)


def place_item(
    rng: Random, width: int, height: int, cell: int, colour: str, shape: str, size: float | None = None
) -> Item:
    """An item at a random place of its cell. size: in pixels; None: random."""
    wide, high = width / 3, height / 3
    if size is None:
        room = min(wide, high)
        low = 0.42 if room < 100 else 0.2
        size = max(MIN_ITEM, room * math.exp(rng.uniform(math.log(low), math.log(0.88))))
    x = (cell % 3 + 0.5) * wide + rng.uniform(-0.4, 0.4) * (wide - size)
    y = (cell // 3 + 0.5) * high + rng.uniform(-0.4, 0.4) * (high - size)
    rgb = _jitter(rng, COLOURS[colour], 12)
    return Item(shape, colour, cell, round(x, 1), round(y, 1), round(size, 1), rgb)


def palette(rng: Random, names: tuple[str, ...]) -> list[str]:
    """A random selection of names, often a small one, so that colours and shapes are repeated."""
    many = rng.choice((1, 2, 2, 3, 4, len(names), len(names)))
    return rng.sample(names, many)


def compose(
    rng: Random,
    width: int,
    height: int,
    *,
    labels: int = 0,
    items: int | None = None,
    code_length: int | None = None,
) -> Scene:
    """A random scene.

    width, height: in pixels.
    labels: how many codes it has, 0 to 3.
    items: how many items it has, as far as there are free cells; None: a random number.
    code_length: characters of each code; None: random.
    """
    background, dark = random_background(rng)
    rows = sorted(rng.sample(range(3), labels))
    codes = [place_label(rng, width, height, row, dark, random_code(rng, code_length)) for row in rows]
    free = [cell for cell in range(9) if cell // 3 not in rows]
    if items is None:
        items = rng.randint(0 if labels else 1, len(free))
    cells = sorted(rng.sample(free, min(items, len(free))))
    colours, shapes = palette(rng, COLOUR_NAMES), palette(rng, SHAPES)
    things = [place_item(rng, width, height, c, rng.choice(colours), rng.choice(shapes)) for c in cells]
    return Scene(width, height, background, tuple(things), tuple(codes))
