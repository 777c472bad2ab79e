"""Where in a scene the answer to a question is to be found, as boxes within the image."""

from __future__ import annotations

from fovea.evaluation.scenes.draw import label_box
from fovea.evaluation.scenes.scene import Box, Item, Label, Scene

MARGIN = 2.0
"""Pixels around a thing: drawing rounds outwards, and edges are seen against what is beside them."""


def around(scene: Scene, *things: Item | Label) -> tuple[Box, ...]:
    """A box for each thing, with a margin, cut to the image."""
    boxes = (thing.box if isinstance(thing, Item) else label_box(thing) for thing in things)
    return tuple(
        (
            max(0.0, left - MARGIN),
            max(0.0, top - MARGIN),
            min(float(scene.width), right + MARGIN),
            min(float(scene.height), bottom + MARGIN),
        )
        for left, top, right, bottom in boxes
    )


def evidence(scene: Scene, colour: str | None, shape: str | None) -> tuple[Box, ...]:
    """The items of that colour and shape (None: any); when there are none, those that share one of the two."""
    found = scene.matching(colour, shape)
    return around(scene, *(found or [i for i in scene.items if colour == i.colour or shape == i.shape]))


def place_box(scene: Scene, cell: int) -> Box:
    """A whole cell of the 3x3 grid."""
    wide, high = scene.width / 3, scene.height / 3
    left, top = cell % 3 * wide, cell // 3 * high
    return left, top, left + wide, top + high
