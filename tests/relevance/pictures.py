"""Pictures with things at known places, and the cells that a question's focus touches."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np

from fovea.evaluation.scenes import HELD_OUT_SEED, Turn
from fovea.evaluation.scenes.dataset import content
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.scene import COLOURS, Background, Box, Item, Label, Scene
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
    """The texture of a scene, and the scene.

    items: (colour, shape, x, y, size in pixels) of each.
    text: (words, x, baseline, grey); capital letters are 14 pixels high.
    """
    things = tuple(Item(shape, colour, 0, x, y, size, COLOURS[colour]) for colour, shape, x, y, size in items)
    labels = ()
    if text is not None:
        words, x, baseline, grey = text
        labels = (Label(words, 0, "DejaVuSans", 14, x, baseline, 1.0, (grey, grey, grey)),)
    scene = Scene(side, side, background(noise=noise), things, labels)
    return texture(np.asarray(draw(scene)), CELL), scene


def cells_touching(boxes: tuple[Box, ...], grid: tuple[int, int]) -> np.ndarray:
    """Whether a box reaches into each cell, (rows, columns)."""
    result = np.zeros(grid, bool)
    for left, top, right, bottom in boxes:
        result[int(top // CELL) : int(-(-bottom // CELL)), int(left // CELL) : int(-(-right // CELL))] = True
    return result


def held_out_questions(kind: str, count: int) -> Iterator[tuple[Texture, Turn, np.ndarray]]:
    """Held-out scenes of 640x640 pixels, each with a question and the cells that contain its answer."""
    for index in range(count):
        (scene,), turns, _ = content(kind, Random(f"{HELD_OUT_SEED}/{kind}/{index}"), (640, 640))
        image = texture(np.asarray(draw(scene)), CELL)
        yield image, turns[0], cells_touching(turns[0].focus, image.grid)


def ranks(values: np.ndarray) -> np.ndarray:
    """For each cell, the share of cells with a lower value; equal ones count half."""
    flat = values.ravel()
    result = np.array([(flat < value).mean() + (flat == value).mean() / 2 for value in flat])
    return result.reshape(values.shape)
