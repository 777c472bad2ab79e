"""Questions about things that the scene does not have. The right answer says that they are not there."""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes.focus import evidence, place_box
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Box, Scene
from fovea.evaluation.scenes.vocabulary import CELLS, COLOUR_NAMES, SHAPES


def _missing(question: str, what: str, focus: tuple[Box, ...] = ()) -> Turn:
    answer = f"There is no {what}."
    return Turn(question, answer, (answer,), focus)


def _absent_name(rng: Random, scene: Scene) -> str:
    names = [f"{c} {s}" for c in COLOUR_NAMES for s in SHAPES if not scene.matching(c, s)]
    near = [n for n in names if scene.matching(colour=n.split()[0]) or scene.matching(shape=n.split()[1])]
    return rng.choice(near if near and rng.random() < 0.6 else names)


def refusal(rng: Random, scene: Scene) -> Turn | None:
    """A question about an absent item, an empty place or an absent text; None: there is no such question."""
    kind = rng.randrange(5)
    if kind == 0:
        absent = [s for s in SHAPES if not scene.matching(shape=s)]
        noun = rng.choice(absent) if absent else None
        return _missing(f"What color is the {noun}?", noun) if noun else None
    if kind == 1:
        shades = [c for c in COLOUR_NAMES if not scene.matching(colour=c)]
        noun = f"{rng.choice(shades)} object" if shades else None
        return _missing(f"What shape is the {noun}?", noun) if noun else None
    if kind == 2:
        noun = _absent_name(rng, scene)
        return _missing(f"Where is the {noun}?", noun, evidence(scene, *noun.split()))
    if kind == 3:
        empty = [place for cell, place in enumerate(CELLS) if scene.in_cell(cell) is None]
        empty = [p for p in empty if CELLS.index(p) // 3 not in {label.row for label in scene.labels}]
        place = rng.choice(empty) if empty else None
        if place is None:
            return None
        answer = f"There is nothing in the {place}."
        focus = (place_box(scene, CELLS.index(place)),)
        return Turn(f"What is in the {place}?", answer, (answer,), focus)
    return None if scene.labels else _missing("What does the text say?", "text")
