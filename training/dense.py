"""Dense targets for auxiliary heads: the content of the scene under each visual token."""

from __future__ import annotations

import numpy as np

from fovea.evaluation.scenes.draw import glyphs
from fovea.evaluation.scenes.scene import CODE_CHARACTERS, COLOUR_NAMES, SHAPES, Scene
from packing import Size

Dense = dict[str, np.ndarray]
LONGEST_CODE = 6


def _tokens(grid: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Regroup a finer grid by token: (rows * a, columns * b, ...) to (rows * columns, a * b, ...)."""
    high, wide = grid.shape[0] // rows, grid.shape[1] // columns
    grid = grid.reshape(rows, high, columns, wide, *grid.shape[2:]).swapaxes(1, 2)
    return grid.reshape(rows * columns, high * wide, *grid.shape[4:])


def dense_targets(scene: Scene, size: Size) -> Dense:
    """The targets of a scene that is drawn at `size` (width, height). In all but counts and places, 0 is
    nothing.

    patches: (tokens, 4, 2), shape and colour under each patch.
    centres: (tokens, 4), shape and colour, as one number, of the item whose centre is in the patch.
    cells: (tokens, 4), cell of that item.
    characters: (tokens, 8), character in each area of 8x16 pixels.
    counts: (tokens, 4), for a token with an item's centre: how many items have its colour, its shape, both,
        and how many items there are; -1 for other tokens.
    ranks: (tokens, 6), the character in the token that is the first, second, ... of its label.
    places: (tokens,), cell of the 3x3 grid that the token is in.
    """
    width, height = size
    rows, columns = height // 32, width // 32
    sx, sy = width / scene.width, height / scene.height
    patches = np.zeros((height // 16, width // 16, 2), np.int64)
    centres = np.zeros((height // 16, width // 16), np.int64)
    cells = np.zeros((height // 16, width // 16), np.int64)
    counts = np.full((rows, columns, 4), -1, np.int64)
    for item in scene.items:
        half = item.size / 2 * 0.8
        left, right = (round((item.x + d) * sx / 16 - 0.5) for d in (-half, half))
        top, bottom = (round((item.y + d) * sy / 16 - 0.5) for d in (-half, half))
        right, bottom = max(right, left), max(bottom, top)
        shape, colour = SHAPES.index(item.shape), COLOUR_NAMES.index(item.colour)
        patches[max(top, 0) : bottom + 1, max(left, 0) : right + 1] = (shape + 1, colour + 1)
        centre = int(item.y * sy // 16), int(item.x * sx // 16)
        centres[centre] = shape * len(COLOUR_NAMES) + colour + 1
        cells[centre] = item.cell + 1
        similar = (
            scene.matching(item.colour),
            scene.matching(shape=item.shape),
            scene.matching(item.colour, item.shape),
        )
        counts[centre[0] // 2, centre[1] // 2] = [*(len(items) for items in similar), len(scene.items)]
    characters = np.zeros((height // 16, width // 8), np.int64)
    ranks = np.zeros((rows, columns, LONGEST_CODE), np.int64)
    for label in scene.labels:
        row = int((label.baseline - label.height / 2) * sy // 16)
        for rank, (character, start, end) in enumerate(glyphs(label)):
            column = int((start + end) / 2 * sx // 8)
            if 0 <= row < height // 16 and 0 <= column < width // 8:
                number = CODE_CHARACTERS.index(character) + 1
                characters[row, column] = number
                ranks[row // 2, column // 4, rank] = number
    y, x = np.mgrid[:rows, :columns]
    places = (2 * y + 1) * 3 // (2 * rows) * 3 + (2 * x + 1) * 3 // (2 * columns)
    return {
        "patches": _tokens(patches, rows, columns),
        "centres": _tokens(centres, rows, columns),
        "cells": _tokens(cells, rows, columns),
        "counts": counts.reshape(-1, 4),
        "characters": _tokens(characters, rows, columns),
        "ranks": ranks.reshape(-1, LONGEST_CODE),
        "places": places.reshape(-1),
    }


def stack_dense(dense: list[Dense]) -> Dense:
    """The targets of several images in one, image by image."""
    return {name: np.concatenate([one[name] for one in dense]) for name in dense[0]}
