"""Computes the focus of a question: boxes in the image that contain the answer."""

from __future__ import annotations

from fovea.evaluation.scenes.draw import label_box
from fovea.evaluation.scenes.scene import Box, Item, Label, Scene

MARGIN = 2.0
"""Margin around a thing in pixels. Drawing rounds outwards, and edges are visible only beside a surround."""


def boxes_around(scene: Scene, *things: Item | Label) -> tuple[Box, ...]:
    """A box around each thing, with a margin, clipped to the image."""
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
    """Boxes of the items of that colour and shape. If there are none: of the items that have one of the two.

    colour, shape: None stands for any.
    """
    items = scene.matching(colour, shape)
    return boxes_around(scene, *(items or [i for i in scene.items if colour == i.colour or shape == i.shape]))


def place_box(scene: Scene, cell: int) -> Box:
    """The box of a whole cell of the 3x3 grid."""
    wide, high = scene.width / 3, scene.height / 3
    left, top = cell % 3 * wide, cell // 3 * high
    return left, top, left + wide, top + high
