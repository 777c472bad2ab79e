"""How questions ask for the form of an answer, and how a thing in a scene is referred to without doubt."""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Box, Item, Scene
from fovea.evaluation.scenes.vocabulary import sentence

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
    """The question as it is, answered by the sentence `full`; or with a request for `word` alone.

    Both forms count as right in either case: the fact is what is asked.
    """
    full = sentence(full)
    if rng.random() < 0.5:
        return Turn(f"{question} {rng.choice(brief)}", word, (word, full), focus)
    return Turn(question, full, (full, word), focus)


def by_shape(scene: Scene) -> list[tuple[Item, str]]:
    """Items that are the only one of their shape, with the noun: `circle`."""
    return [(i, i.shape) for i in scene.items if len(scene.matching(shape=i.shape)) == 1]


def by_colour(scene: Scene) -> list[tuple[Item, str]]:
    """Items that are the only one of their colour: `red object`."""
    return [(i, f"{i.colour} object") for i in scene.items if len(scene.matching(colour=i.colour)) == 1]


def by_name(scene: Scene) -> list[tuple[Item, str]]:
    """Items whose colour and shape together are unique: `red circle`."""
    return [(i, i.name) for i in scene.items if len(scene.matching(i.colour, i.shape)) == 1]


def by_place(scene: Scene) -> list[tuple[Item, str]]:
    """All items: `object in the top left`."""
    return [(i, f"object in the {i.place}") for i in scene.items]


def pick(rng: Random, *pools: list[tuple[Item, str]]) -> tuple[Item, str] | None:
    """One reference, from a random one of the pools that are not empty; None when all are."""
    filled = [pool for pool in pools if pool]
    return rng.choice(rng.choice(filled)) if filled else None
