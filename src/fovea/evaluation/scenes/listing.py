"""Questions about the whole image: lists of its objects in reading order, and descriptions."""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes.focus import boxes_around
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Scene
from fovea.evaluation.scenes.vocabulary import COLOUR_NAMES, SHAPES, article, join_phrases, sentence


def _list(scene: Scene, question: str, names: list[str]) -> Turn:
    answer = ", ".join(names) or "none"
    return Turn(question, answer, (answer,), boxes_around(scene, *scene.items))


def listing(rng: Random, scene: Scene) -> Turn | None:
    """A question for a list of all objects, or of the colours or shapes that occur.

    Objects are listed in reading order (rows from the top, each from the left). Colours and shapes are listed
    in the order of the vocabulary, each once.
    """
    kind = rng.random()
    if kind < 0.6:
        forms = (
            "List the objects.",
            "List all objects in the image.",
            "Which objects are in the image? Give a list.",
        )
        return _list(scene, rng.choice(forms), [item.name for item in scene.items])
    if kind < 0.8:
        shades = {item.colour for item in scene.items}
        names = [name for name in COLOUR_NAMES if name in shades]
        return _list(scene, "List the colors of the objects.", names)
    shapes = {item.shape for item in scene.items}
    return _list(scene, "List the shapes in the image.", [name for name in SHAPES if name in shapes])


def describe(rng: Random, scene: Scene) -> Turn | None:
    """A question for a description: every item with its place in reading order, then labels from the top."""
    parts = [f"{article(item.name)} in the {item.place}" for item in scene.items]
    parts += [f'the text "{label.text}" at the {label.place}' for label in scene.labels]
    forms = ("Describe the image.", "What is in this image?", "What do you see?", "Describe this picture.")
    answer = sentence(join_phrases(parts) or "the image is empty")
    return Turn(rng.choice(forms), answer, (answer,), boxes_around(scene, *scene.items, *scene.labels))
