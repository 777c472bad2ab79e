"""Questions about two items: which one is left of, right of, above or below the other."""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes.focus import boxes_around
from fovea.evaluation.scenes.phrasing import by_name, by_shape, turn
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Item, Scene

_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def _relations(one: Item, other: Item) -> list[str]:
    """The relations that are true of two items in different cells: `one` is ... `other`."""
    relations = []
    if one.column != other.column:
        relations.append("left of" if one.column < other.column else "right of")
    if one.row != other.row:
        relations.append("above" if one.row < other.row else "below")
    return relations


def relation(rng: Random, scene: Scene) -> Turn | None:
    """A question about the relation of two items; None: fewer than two items have an unambiguous name.

    Most are yes-or-no questions, with both answers equally likely. For two items in one row or column it may
    also be the question on which side one of them is.
    """
    names = by_name(scene) if rng.random() < 0.7 else by_shape(scene)
    if len(names) < 2:
        return None
    (one, noun), (other, other_noun) = rng.sample(names, 2)
    relations, both = _relations(one, other), boxes_around(scene, one, other)
    if len(relations) == 1 and rng.random() < 0.5:
        question = f"Where is the {noun} relative to the {other_noun}?"
        full = f"the {noun} is {relations[0]} the {other_noun}"
        return turn(rng, question, relations[0], full, ("Answer briefly.",), both)
    claim = rng.choice(relations)
    true = rng.random() < 0.5
    claim = claim if true else _OPPOSITE[claim]
    question = rng.choice(("Is the {} {} the {}?", "Is the {} to be found {} the {}?")).format(
        noun, claim, other_noun
    )
    word, full = ("yes", "yes, it is") if true else ("no", "no, it is not")
    return turn(rng, question, word, full, focus=both)
