"""Wording of questions: requests for a form of answer, and unambiguous names for the items of a scene."""

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
