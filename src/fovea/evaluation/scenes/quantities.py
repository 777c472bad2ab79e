"""Questions about quantities: whether there is any item of a kind, and how many there are."""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes.focus import evidence
from fovea.evaluation.scenes.phrasing import BRIEF_NUMBER, turn
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Scene
from fovea.evaluation.scenes.vocabulary import COLOUR_NAMES, SHAPES, article, plural

Predicate = tuple[str | None, str | None]
"""Colour and shape of items; None stands for any."""


def noun_of(predicate: Predicate) -> str:
    """A predicate as a noun phrase, such as "red circle" or "object"."""
    shade, form = predicate
    return " ".join(filter(None, (shade, form or "object")))


def _predicates(rng: Random, scene: Scene) -> dict[Predicate, int]:
    """Predicates to ask about, and how many items each matches. Some nearly match an item of the scene."""
    pairs: set[Predicate] = {(None, None)}
    for item in scene.items:
        other_shade, other_form = rng.choice(COLOUR_NAMES), rng.choice(SHAPES)
        pairs |= {(item.colour, item.shape), (item.colour, None), (None, item.shape)}
        pairs |= {(item.colour, other_form), (other_shade, item.shape)}
    pairs |= {(rng.choice(COLOUR_NAMES), None), (None, rng.choice(SHAPES))}
    if len(scene.items) > 1:
        first, second = rng.sample(scene.items, 2)
        pairs.add((first.colour, second.shape))
    ordered = sorted(pairs, key=lambda pair: (pair[0] or "", pair[1] or ""))
    return {pair: len(scene.matching(*pair)) for pair in ordered}


def existence(rng: Random, scene: Scene) -> Turn | None:
    """A question about whether there is an item of a kind; None: the scene offers no such question.

    Yes and no are equally likely. If the answer is no, the scene mostly has an item that nearly matches.
    """
    counts = _predicates(rng, scene)
    del counts[(None, None)]
    yes = rng.random() < 0.5
    candidates = [pair for pair, count in counts.items() if (count > 0) == yes]
    if not candidates:
        return None
    predicate = rng.choice(candidates)
    noun = noun_of(predicate)
    forms = ("Is there {} in the image?", "Is there {}?", "Can you see {}?", "Does the image show {}?")
    question = rng.choice(forms).format(article(noun))
    full = f"yes, there is {article(noun)}" if yes else f"no, there is no {noun}"
    return turn(rng, question, "yes" if yes else "no", full, focus=evidence(scene, *predicate))


def counting_of(rng: Random, scene: Scene, answer: int | None = None) -> tuple[Turn, int] | None:
    """A counting question, and its answer; None: the scene offers no question with that answer.

    answer: the number to ask for; None: each count that the scene offers is equally likely.
    """
    counts = _predicates(rng, scene)
    choices = sorted(set(counts.values()))
    number = rng.choice(choices) if answer is None else answer
    candidates = [pair for pair, count in counts.items() if count == number]
    if not candidates:
        return None
    predicate = rng.choice(candidates)
    noun = noun_of(predicate)
    forms = (
        "How many {} are there?",
        "How many {} are in the image?",
        "How many {} can you see?",
        "Count the {}.",
    )
    question = rng.choice(forms).format(plural(noun))
    full = f"there is 1 {noun}" if number == 1 else f"there are {number} {plural(noun)}"
    return turn(rng, question, str(number), full, BRIEF_NUMBER, evidence(scene, *predicate)), number


def counting(rng: Random, scene: Scene) -> Turn | None:
    """A question about the number of all objects, or of those with a colour, a shape or both; 0 to 9."""
    question = counting_of(rng, scene)
    return None if question is None else question[0]
