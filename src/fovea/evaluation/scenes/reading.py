"""Questions about the text of the labels in a scene."""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes.focus import boxes_around
from fovea.evaluation.scenes.phrasing import BRIEF_TEXT
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Box, Label, Scene


def _reply(rng: Random, question: str, text: str, focus: tuple[Box, ...]) -> Turn:
    full = f'The text is "{text}".'
    if rng.random() < 0.5:
        return Turn(f"{question} {rng.choice(BRIEF_TEXT)}", text, (text, full), focus)
    return Turn(question, full, (full, text), focus)


def reading_of(rng: Random, scene: Scene) -> tuple[Turn, Label] | None:
    """A question about a label's text, and the label; None: the scene has no label.

    If there are several labels, the question names the label's row.
    """
    if not scene.labels:
        return None
    label = rng.choice(scene.labels)
    forms: tuple[str, ...] = (
        "What is the text at the {}?",
        "Read the text at the {}.",
        "What is written at the {}?",
    )
    if len(scene.labels) == 1 and rng.random() < 0.75:
        forms = (
            "What does the text say?",
            "Read the text.",
            "What text is in the image?",
            "What is written in the image?",
        )
    question = rng.choice(forms).format(label.place)
    return _reply(rng, question, label.text, boxes_around(scene, label)), label


def reading(rng: Random, scene: Scene) -> Turn | None:
    """A question about a label's text; None: the scene has no label."""
    question = reading_of(rng, scene)
    return None if question is None else question[0]
