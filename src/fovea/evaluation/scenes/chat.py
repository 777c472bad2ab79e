"""Conversations of several turns about one scene, in which later turns refer to earlier ones."""

from __future__ import annotations

from random import Random

from fovea.evaluation.scenes import questions
from fovea.evaluation.scenes.phrasing import boxes_around, by_shape
from fovea.evaluation.scenes.scene import Box, Item, Scene, Turn

_PLAIN = (
    questions.colour, questions.shape, questions.position, questions.existence,
    questions.counting, questions.reading, questions.relation,
)  # fmt: skip
_MANNERS = (("Thank you.", "You are welcome."), ("Thanks!", "You are welcome."), ("Goodbye.", "Goodbye."))
_OPENINGS = (
    ("Hello.", "Hello! Ask me about an image."),
    ("Hi!", "Hello! Ask me about an image."),
    ("Who are you?", "I am fovea-tiny, a small vision-language model."),
    ("What can you do?", "I can name colors, shapes and places, count objects and read short codes."),
)


def _small_turn(pair: tuple[str, str]) -> Turn:
    return Turn(pair[0], pair[1], (pair[1],))


def _follow_ups(rng: Random, item: Item, focus: tuple[Box, ...]) -> list[Turn]:
    """One or two questions about "it", the item of the previous turn."""
    where = f"It is in the {item.place}."
    shade = f"It is {item.colour}."
    turns = [
        Turn("And where is it?", where, (where, item.place), focus),
        Turn("And what color is it?", shade, (shade, item.colour), focus),
    ]
    rng.shuffle(turns)
    return turns[: rng.randint(1, 2)]


def chat(rng: Random, scene: Scene) -> tuple[Turn, ...] | None:
    """2 to 5 turns about a scene; None: the scene has too little for two turns.

    Half of the conversations stay with one item, which later turns call "it".
    """
    turns: list[Turn] = []
    unique = by_shape(scene)
    if unique and rng.random() < 0.5:
        item, noun = rng.choice(unique)
        opening = f"Yes, there is a {noun}."
        focus = boxes_around(scene, item)
        turns = [Turn(f"Is there a {noun}?", opening, (opening, "yes"), focus)]
        turns += _follow_ups(rng, item, focus)
    else:
        candidates = (rng.choice(_PLAIN)(rng, scene) for _ in range(rng.randint(2, 4)))
        turns = [turn for turn in candidates if turn is not None]
    if rng.random() < 0.15:
        turns.append(_small_turn(rng.choice(_MANNERS)))
    return tuple(turns) if len(turns) > 1 else None


def small_talk(rng: Random) -> Turn:
    """A turn that needs no image."""
    return _small_turn(rng.choice(_OPENINGS + _MANNERS))
