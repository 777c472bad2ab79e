"""Training batches of single images, with several questions each, and of text without any."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
from PIL import Image

from dense import dense_targets, stacked
from fovea.evaluation.scenes import attributes, listing, quantities, reading, relations
from fovea.evaluation.scenes.chat import chat, small_talk
from fovea.evaluation.scenes.compose import compose
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.refusal import refusal
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Scene
from fovea.evaluation.scenes.small import compose_small
from fovea.evaluation.scenes.structured import structured
from packing import Batch, Packer, Shown, Size, branches, collate, conversation

ASKERS: dict[str, tuple[Callable[[Random, Scene], Turn | None], float]] = {
    "colour": (attributes.colour, 0.6),
    "shape": (attributes.shape, 0.6),
    "position": (attributes.position, 0.8),
    "existence": (quantities.existence, 1.0),
    "counting": (quantities.counting, 7.0),
    "reading": (reading.reading, 2.2),
    "relation": (relations.relation, 2.0),
    "json": (structured, 1.2),
    "refusal": (refusal, 0.4),
    "listing": (listing.listing, 0.7),
    "describe": (listing.describe, 0.8),
}
SYSTEMS = ("You are a helpful assistant.", "Answer the question.", "You are fovea-tiny.")


def fitted(image: Image.Image, size: Size) -> np.ndarray:
    """The pixels at (width, height), resized the way that the image processor does."""
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(image)


def questions(rng: Random, scene: Scene, count: int) -> list[Turn]:
    names = list(ASKERS)
    weights = [ASKERS[name][1] for name in names]
    asked: dict[str, Turn] = {}
    for _ in range(4 * count):
        turn = ASKERS[rng.choices(names, weights)[0]][0](rng, scene)
        if turn is not None:
            asked.setdefault(turn.question, turn)
        if len(asked) == count:
            break
    return list(asked.values())


def some_system(rng: Random) -> str | None:
    return rng.choice(SYSTEMS) if rng.random() < 0.15 else None


def scene_batch(rng: Random, packer: Packer, size: Size, count: int, asked: int, talk: bool) -> Batch:
    """`count` single images of one size. talk: conversations instead of branches."""
    width, height = size
    system = some_system(rng)
    off = rng.random() < 0.2
    sequences, pictures, dense = [], [], []
    while len(sequences) < count:
        drawn = (width + rng.randint(-15, 15), height + rng.randint(-15, 15)) if off else size
        if min(size) >= 448 and rng.random() < 0.4:
            scene = compose_small(rng, *drawn)
        else:
            labels = rng.choice((0, 0, 0, 0, 0, 1, 1, 1, 2, 3))
            scene = compose(rng, max(128, drawn[0]), max(128, drawn[1]), labels=labels)
        turns = (
            chat(rng, scene)
            if talk and rng.random() < 0.5
            else tuple(questions(rng, scene, 4 if talk else asked))
        )
        if not turns:
            continue
        shown = Shown((height // 32, width // 32))
        if talk:
            sequences.append(conversation(packer, list(turns), shown, system, rng.random() < 0.4))
        else:
            sequences.append(branches(packer, list(turns), shown, system))
        pictures.append([fitted(draw(scene), size)])
        dense.append(dense_targets(scene, size))
    return collate(sequences, pictures) | stacked(dense)


def text_batch(rng: Random, packer: Packer, count: int) -> Batch:
    """Small talk without an image."""
    nothing = Shown((0, 0), images=0)
    made = [conversation(packer, [small_talk(rng)], nothing, some_system(rng), False) for _ in range(count)]
    return collate(made, [[] for _ in made])
