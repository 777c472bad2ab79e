"""Dense targets: what each visual token of a scene is to know."""

from __future__ import annotations

import numpy as np

from fovea.evaluation.scenes.draw import glyphs
from fovea.evaluation.scenes.scene import Scene
from fovea.evaluation.scenes.vocabulary import CODE_CHARACTERS, COLOUR_NAMES, SHAPES
from packing import Size

Dense = dict[str, np.ndarray]
LONGEST_CODE = 6


def _tokens(grid: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """(rows * a, columns * b, ...) to (rows * columns, a * b, ...): what lies under each token."""
    high, wide = grid.shape[0] // rows, grid.shape[1] // columns
    grid = grid.reshape(rows, high, columns, wide, *grid.shape[2:]).swapaxes(1, 2)
    return grid.reshape(rows * columns, high * wide, *grid.shape[4:])


def dense_targets(scene: Scene, size: Size) -> Dense:
    """What each visual token is to know, 0 for nothing.

    patches: (tokens, 4, 2) shape and colour under each patch. centres: (tokens, 4) the shape and colour, as one
    number, of the item whose centre the patch holds; cells: (tokens, 4) its cell. characters: (tokens, 8) per 8x16 pixels.
    counts: (tokens, 4) where an item's centre is: how many items share its colour, its shape, both, and how many
    there are at all; -1 elsewhere. ranks: (tokens, 6) the character that is the first, second, ... of its label. places: (tokens,) cell.
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
        alike = (
            scene.matching(item.colour),
            scene.matching(shape=item.shape),
            scene.matching(item.colour, item.shape),
        )
        counts[centre[0] // 2, centre[1] // 2] = [*(len(items) for items in alike), len(scene.items)]
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


def stacked(dense: list[Dense]) -> Dense:
    return {name: np.concatenate([one[name] for one in dense]) for name in dense[0]}
