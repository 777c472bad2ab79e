"""Draws training batches of single images with several questions each, and batches of text without images."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
from PIL import Image

from dense import dense_targets, stack_dense
from fovea.evaluation.scenes import questions as attributes
from fovea.evaluation.scenes import questions as listing
from fovea.evaluation.scenes import questions as quantities
from fovea.evaluation.scenes import questions as reading
from fovea.evaluation.scenes import questions as relations
from fovea.evaluation.scenes.chat import chat, small_talk
from fovea.evaluation.scenes.compose import compose
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.questions import refusal
from fovea.evaluation.scenes.scene import Scene, Turn
from fovea.evaluation.scenes.small import compose_small
from fovea.evaluation.scenes.structured import TOOLS, Tool, form, structured, tool_use
from packing import Batch, Packer, PromptMedia, Size, branches, collate, conversation

QUESTIONS: dict[str, tuple[Callable[[Random, Scene], Turn | None], float]] = {
    "colour": (attributes.colour, 0.6),
    "shape": (attributes.shape, 0.6),
    "position": (attributes.position, 0.8),
    "existence": (quantities.existence, 1.0),
    "counting": (quantities.counting, 7.0),
    "reading": (reading.reading, 2.2),
    "relation": (relations.relation, 2.0),
    "json": (structured, 1.2),
    "refusal": (refusal, 0.4),
    "listing": (listing.listing, 1.6),
    "describe": (listing.describe, 2.4),
    "form": (form, 2.5),
}
"""The function that asks each kind of question, and how often the kind is chosen, as a weight."""
SYSTEMS = ("You are a helpful assistant.", "Answer the question.", "You are fovea-tiny.")


def fit_image(image: Image.Image, size: Size) -> np.ndarray:
    """The pixels at (width, height), resized like the image processor does it."""
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(image)


def questions(rng: Random, scene: Scene, count: int) -> list[Turn]:
    """Up to `count` different questions about a scene, of random kinds."""
    names = list(QUESTIONS)
    weights = [QUESTIONS[name][1] for name in names]
    turns: dict[str, Turn] = {}
    for _ in range(4 * count):
        turn = QUESTIONS[rng.choices(names, weights)[0]][0](rng, scene)
        if turn is not None:
            turns.setdefault(turn.question, turn)
        if len(turns) == count:
            break
    return list(turns.values())


def random_system(rng: Random) -> str | None:
    return rng.choice(SYSTEMS) if rng.random() < 0.15 else None


def scene_batch(rng: Random, packer: Packer, size: Size, count: int, per_image: int, talk: bool) -> Batch:
    """`count` single images of one size.

    per_image: questions about each.
    talk: pack the questions as a conversation, instead of independent branches.
    """
    width, height = size
    system = random_system(rng)
    off = rng.random() < 0.2
    sequences, pictures, dense = [], [], []
    while len(sequences) < count:
        canvas = (width + rng.randint(-15, 15), height + rng.randint(-15, 15)) if off else size
        if min(size) >= 448 and rng.random() < 0.4:
            scene = compose_small(rng, *canvas)
        else:
            labels = rng.choice((0, 0, 0, 0, 0, 1, 1, 1, 2, 3))
            scene = compose(rng, max(128, canvas[0]), max(128, canvas[1]), labels=labels)
        turns = (
            chat(rng, scene)
            if talk and rng.random() < 0.5
            else tuple(questions(rng, scene, 4 if talk else per_image))
        )
        if not turns:
            continue
        media = PromptMedia((height // 32, width // 32))
        if talk:
            sequences.append(conversation(packer, list(turns), media, system, rng.random() < 0.4))
        else:
            sequences.append(branches(packer, list(turns), media, system))
        pictures.append([fit_image(draw(scene), size)])
        dense.append(dense_targets(scene, size))
    return collate(sequences, pictures) | stack_dense(dense)


def tool_batch(rng: Random, packer: Packer, size: Size, count: int) -> Batch:
    """`count` single images of one size, with tools on offer.

    Each has one or two requests that need a tool, and in some conversations a question that needs none.
    """
    width, height = size
    sequences, pictures, dense = [], [], []
    while len(sequences) < count:
        scene = compose(rng, max(128, width), max(128, height), labels=rng.choice((0, 1, 1)))
        parts = [tool_use(rng, scene) for _ in range(rng.choice((1, 1, 2)))]
        if rng.random() < 0.35:
            parts += [(turn,) for turn in questions(rng, scene, 2) if turn.schema is None]
        rng.shuffle(parts)
        turns = [turn for part in parts if part for turn in part]
        if not turns:
            continue
        called = [tool for tool in TOOLS if any(f'"{_name(tool)}"' in turn.answer for turn in turns)]
        others = [tool for tool in TOOLS if tool not in called and rng.random() < 0.6]
        offered = rng.sample([*called, *others], len(called) + len(others))
        system = offer(offered, random_system(rng))
        media = PromptMedia((height // 32, width // 32))
        sequences.append(conversation(packer, turns, media, system, rng.random() < 0.3))
        pictures.append([fit_image(draw(scene), size)])
        dense.append(dense_targets(scene, size))
    return collate(sequences, pictures) | stack_dense(dense)


def offer(tools: list[Tool], system: str | None) -> str | None:
    """The text of the system message that offers tools, as the chat template writes it."""
    if not tools:
        return system
    lines = [f"{_name(tool)}({', '.join(tool['function']['parameters']['properties'])})" for tool in tools]
    return "\n".join([*([system] if system else []), "Tools:", *lines])


def _name(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name


def text_batch(rng: Random, packer: Packer, count: int) -> Batch:
    """Small talk without an image."""
    nothing = PromptMedia((0, 0), images=0)
    sequences = [
        conversation(packer, [small_talk(rng)], nothing, random_system(rng), False) for _ in range(count)
    ]
    return collate(sequences, [[] for _ in sequences])
