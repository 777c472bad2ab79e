"""Parts that all questions share: their wording, unambiguous names for items, and their focus.

The focus of a question is the boxes in the image that contain the answer.
"""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes.draw import label_box
from fovea.evaluation.scenes.scene import Box, Item, Label, Scene, Turn, sentence

BRIEF = ("Answer in one word.", "One word only.", "Reply with one word.", "Answer briefly.")
BRIEF_PLACE = (
    "Answer with the position only.",
    "Position only.",
    "Answer briefly.",
    "Reply with the position.",
)
BRIEF_NUMBER = ("Answer with a number.", "Number only.", "Reply with the number.", "Answer briefly.")
BRIEF_TEXT = ("Reply with the text only.", "Text only.", "Only the text.", "Answer briefly.")


def turn(
    rng: Random,
    question: str,
    word: str,
    full: str,
    brief: tuple[str, ...] = BRIEF,
    focus: tuple[Box, ...] = (),
) -> Turn:
    """A turn with the question alone, answered by a sentence, or with a request for a brief answer.

    Both answers count as right for both forms, because the fact is tested and not the form.

    word: the brief answer.
    full: the answer as a sentence, without upper first letter and full stop.
    brief: the requests for a brief answer to choose from.
    focus: boxes in the image that contain the answer.
    """
    full = sentence(full)
    if rng.random() < 0.5:
        return Turn(f"{question} {rng.choice(brief)}", word, (word, full), focus)
    return Turn(question, full, (full, word), focus)


def by_shape(scene: Scene) -> list[tuple[Item, str]]:
    """Items that are the only one of their shape, each with its noun: "circle"."""
    return [(i, i.shape) for i in scene.items if len(scene.matching(shape=i.shape)) == 1]


def by_colour(scene: Scene) -> list[tuple[Item, str]]:
    """Items that are the only one of their colour, each with its noun: "red object"."""
    return [(i, f"{i.colour} object") for i in scene.items if len(scene.matching(colour=i.colour)) == 1]


def by_name(scene: Scene) -> list[tuple[Item, str]]:
    """Items that are the only one of their colour and shape together, each with its noun: "red circle"."""
    return [(i, i.name) for i in scene.items if len(scene.matching(i.colour, i.shape)) == 1]


def by_place(scene: Scene) -> list[tuple[Item, str]]:
    """All items, each with its noun: "object in the top left"."""
    return [(i, f"object in the {i.place}") for i in scene.items]


def pick(rng: Random, *pools: list[tuple[Item, str]]) -> tuple[Item, str] | None:
    """A random item and noun from a random pool that is not empty; None: all pools are empty."""
    choices = [pool for pool in pools if pool]
    return rng.choice(rng.choice(choices)) if choices else None


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
