"""Questions about one thing: its colour, its shape, its place, and what a place holds."""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes.focus import around
from fovea.evaluation.scenes.phrasing import BRIEF_PLACE, by_colour, by_name, by_place, by_shape, pick, turn
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Item, Scene
from fovea.evaluation.scenes.vocabulary import article


def colour(rng: Random, scene: Scene) -> Turn | None:
    """The colour of an item named by its shape or its place."""
    found = pick(rng, by_shape(scene), by_place(scene))
    if found is None:
        return None
    item, noun = found
    forms = (
        "What color is the {}?",
        "What colour is the {}?",
        "Which color does the {} have?",
        "Name the color of the {}.",
    )
    question = rng.choice(forms).format(noun)
    return turn(rng, question, item.colour, f"the {noun} is {item.colour}", focus=around(scene, item))


def shape(rng: Random, scene: Scene) -> Turn | None:
    """The shape of an item named by its colour or its place."""
    found = pick(rng, by_colour(scene), by_place(scene))
    if found is None:
        return None
    item, noun = found
    forms = (
        "What shape is the {}?",
        "Which shape is the {}?",
        "What is the shape of the {}?",
        "Name the shape of the {}.",
    )
    question = rng.choice(forms).format(noun)
    return turn(rng, question, item.shape, f"the {noun} is {article(item.shape)}", focus=around(scene, item))


def _where(rng: Random, scene: Scene, item: Item, noun: str) -> Turn:
    forms = ("Where is the {}?", "In which part of the image is the {}?", "What is the position of the {}?")
    question, full = rng.choice(forms).format(noun), f"the {noun} is in the {item.place}"
    return turn(rng, question, item.place, full, BRIEF_PLACE, around(scene, item))


def position(rng: Random, scene: Scene) -> Turn | None:
    """The cell of an item; or, a third of the time, the item in a cell."""
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
            around(scene, item),
        )
    found = pick(rng, by_shape(scene), by_colour(scene), by_name(scene))
    if found is None:
        return None
    return _where(rng, scene, *found)
