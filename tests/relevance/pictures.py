"""Pictures of which it is known where anything is, and the cells that a question's focus touches."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np

from fovea.evaluation.scenes import HELD_OUT_SEED, Turn
from fovea.evaluation.scenes.dataset import content
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.scene import Background, Box, Item, Label, Scene
from fovea.evaluation.scenes.vocabulary import COLOURS
from fovea.relevance.texture import Texture, texture

CELL = 32


def background(grey: int = 235, noise: int = 0) -> Background:
    return Background((grey, grey, grey), (grey, grey, grey), True, noise, 7)


def picture(
    *items: tuple[str, str, float, float, float],
    text: tuple[str, float, float, int] | None = None,
    side: int = 512,
    noise: int = 0,
) -> tuple[Texture, Scene]:
    """items: (colour, shape, x, y, size in pixels); text: (words, x, baseline, grey), 14 pixels high."""
    things = tuple(Item(shape, colour, 0, x, y, size, COLOURS[colour]) for colour, shape, x, y, size in items)
    labels = ()
    if text is not None:
        words, x, baseline, grey = text
        labels = (Label(words, 0, "DejaVuSans", 14, x, baseline, 1.0, (grey, grey, grey)),)
    scene = Scene(side, side, background(noise=noise), things, labels)
    return texture(np.asarray(draw(scene)), CELL), scene


def touched(boxes: tuple[Box, ...], grid: tuple[int, int]) -> np.ndarray:
    """(rows, columns): whether a box reaches into the cell."""
    found = np.zeros(grid, bool)
    for left, top, right, bottom in boxes:
        found[int(top // CELL) : int(-(-bottom // CELL)), int(left // CELL) : int(-(-right // CELL))] = True
    return found


def asked(kind: str, count: int) -> Iterator[tuple[Texture, Turn, np.ndarray]]:
    """Held-out scenes of 640x640 with a question, and the cells that its answer is in."""
    for index in range(count):
        (scene,), turns, _ = content(kind, Random(f"{HELD_OUT_SEED}/{kind}/{index}"), (640, 640))
        seen = texture(np.asarray(draw(scene)), CELL)
        yield seen, turns[0], touched(turns[0].focus, seen.grid)


def ranks(values: np.ndarray) -> np.ndarray:
    """Share of the cells that have less, equals counted half; in the values' shape."""
    flat = values.ravel()
    found = np.array([(flat < value).mean() + (flat == value).mean() / 2 for value in flat])
    return found.reshape(values.shape)
