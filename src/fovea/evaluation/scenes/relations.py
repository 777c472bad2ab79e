"""Questions about two things: which is left of, right of, above or below the other."""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes.focus import around
from fovea.evaluation.scenes.phrasing import by_name, by_shape, turn
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Item, Scene

_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def _relations(one: Item, other: Item) -> list[str]:
    """What holds between two items of different columns or rows: `one` is ... `other`."""
    held = []
    if one.column != other.column:
        held.append("left of" if one.column < other.column else "right of")
    if one.row != other.row:
        held.append("above" if one.row < other.row else "below")
    return held


def relation(rng: Random, scene: Scene) -> Turn | None:
    """Yes or no, equally likely; or, of two items in one row or column, on which side one is."""
    named = by_name(scene) if rng.random() < 0.7 else by_shape(scene)
    if len(named) < 2:
        return None
    (one, noun), (other, other_noun) = rng.sample(named, 2)
    held, both = _relations(one, other), around(scene, one, other)
    if len(held) == 1 and rng.random() < 0.5:
        question = f"Where is the {noun} relative to the {other_noun}?"
        full = f"the {noun} is {held[0]} the {other_noun}"
        return turn(rng, question, held[0], full, ("Answer briefly.",), both)
    asked = rng.choice(held)
    true = rng.random() < 0.5
    asked = asked if true else _OPPOSITE[asked]
    question = rng.choice(("Is the {} {} the {}?", "Is the {} to be found {} the {}?")).format(
        noun, asked, other_noun
    )
    word, full = ("yes", "yes, it is") if true else ("no", "no, it is not")
    return turn(rng, question, word, full, focus=both)
