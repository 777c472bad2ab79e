"""Questions about one item: its colour, its shape, its place, and the item at a place."""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes.focus import boxes_around
from fovea.evaluation.scenes.phrasing import BRIEF_PLACE, by_colour, by_name, by_place, by_shape, pick, turn
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Item, Scene
from fovea.evaluation.scenes.vocabulary import article


def colour(rng: Random, scene: Scene) -> Turn | None:
    """A question about the colour of an item, which is named by its shape or place; None: no such item."""
    reference = pick(rng, by_shape(scene), by_place(scene))
    if reference is None:
        return None
    item, noun = reference
    forms = (
        "What color is the {}?",
        "What colour is the {}?",
        "Which color does the {} have?",
        "Name the color of the {}.",
    )
    question = rng.choice(forms).format(noun)
    return turn(rng, question, item.colour, f"the {noun} is {item.colour}", focus=boxes_around(scene, item))


def shape(rng: Random, scene: Scene) -> Turn | None:
    """A question about the shape of an item, which is named by its colour or place; None: no such item."""
    reference = pick(rng, by_colour(scene), by_place(scene))
    if reference is None:
        return None
    item, noun = reference
    forms = (
        "What shape is the {}?",
        "Which shape is the {}?",
        "What is the shape of the {}?",
        "Name the shape of the {}.",
    )
    question = rng.choice(forms).format(noun)
    return turn(
        rng, question, item.shape, f"the {noun} is {article(item.shape)}", focus=boxes_around(scene, item)
    )


def _where(rng: Random, scene: Scene, item: Item, noun: str) -> Turn:
    forms = ("Where is the {}?", "In which part of the image is the {}?", "What is the position of the {}?")
    question, full = rng.choice(forms).format(noun), f"the {noun} is in the {item.place}"
    return turn(rng, question, item.place, full, BRIEF_PLACE, boxes_around(scene, item))


def position(rng: Random, scene: Scene) -> Turn | None:
    """A question about the cell of an item, or (a third of the time) about the item in a cell.

    None: no item can be named without ambiguity.
    """
    if scene.items and rng.random() < 0.33:
        item = rng.choice(scene.items)
        forms = ("What is in the {}?", "What do you see in the {}?", "Which object is in the {}?")
        full = f"there is {article(item.name)} in the {item.place}"
        return turn(
            rng,
            rng.choice(forms).format(item.place),
            item.name,
            full,
            ("Answer briefly.", "Color and shape only."),
            boxes_around(scene, item),
        )
    reference = pick(rng, by_shape(scene), by_colour(scene), by_name(scene))
    if reference is None:
        return None
    return _where(rng, scene, *reference)
