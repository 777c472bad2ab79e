"""Training and evaluation batches as NumPy arrays: pictures, packed conversations, dense targets.

A sequence holds a prefix with the images and several questions behind it, either as independent branches (each
sees the prefix and itself; positions restart after the prefix) or as one conversation of several turns.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from fovea.evaluation.scenes import attributes, listing, quantities, reading, relations
from fovea.evaluation.scenes.chat import chat, small_talk
from fovea.evaluation.scenes.compose import compose
from fovea.evaluation.scenes.draw import draw, glyphs
from fovea.evaluation.scenes.motion import ask_motion, motion_scenes
from fovea.evaluation.scenes.pairs import ask_pair, pair_scenes
from fovea.evaluation.scenes.refusal import refusal
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.scenes.scene import Scene
from fovea.evaluation.scenes.structured import structured
from fovea.evaluation.scenes.vocabulary import CODE_CHARACTERS, COLOUR_NAMES, SHAPES
from model import BLOCK

Batch = dict[str, np.ndarray]
Size = tuple[int, int]

ASKERS: dict[str, tuple[Callable[[Random, Scene], Turn | None], float]] = {
    "colour": (attributes.colour, 0.6),
    "shape": (attributes.shape, 0.6),
    "position": (attributes.position, 0.8),
    "existence": (quantities.existence, 1.0),
    "counting": (quantities.counting, 7.0),
    "reading": (reading.reading, 1.5),
    "relation": (relations.relation, 2.0),
    "json": (structured, 0.6),
    "refusal": (refusal, 0.4),
    "listing": (listing.listing, 0.35),
    "describe": (listing.describe, 0.12),
}
SYSTEMS = ("You are a helpful assistant.", "Answer the question.", "You are fovea-tiny.")


class Packer:
    """Text to packed sequences. Roles and markers follow the chat template exactly."""

    def __init__(self, path: str) -> None:
        self.tokenizer = Tokenizer.from_file(path)
        special = self.tokenizer.token_to_id
        self.image, self.start, self.end = (
            special("<|image_pad|>"),
            special("<|im_start|>"),
            special("<|im_end|>"),
        )
        self.vision_start, self.vision_end = special("<|vision_start|>"), special("<|vision_end|>")
        self.user = [self.start, *self.text("user\n")]
        self.assistant = [self.end, *self.text("\n"), self.start, *self.text("assistant\n")]
        self.again = [*self.text("\n"), *self.user]

    def text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def head(self, system: str | None) -> list[int]:
        if system is None:
            return list(self.user)
        return [self.start, *self.text("system\n" + system), self.end, *self.text("\n"), *self.user]

    def turn(self, turn: Turn, *, ask: bool = True) -> tuple[list[int], int]:
        """Ids of question and answer, and how many at the end are the answer with its <|im_end|>."""
        answer = [*self.text(turn.answer), self.end]
        question = self.text(turn.question) if ask else []
        return [*question, *self.assistant, *answer], len(answer)


class Sequence:
    """One packed sequence under construction."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[tuple[int, int, int]] = []
        self.segment: list[int] = []
        self.graded: list[int] = []
        self.groups: list[int] = []
        self.slots: list[int] = []
        self.next = 0
        self.prefix = 0

    def add(self, ids: list[int], segment: int = 0, answer: int = 0, group: int = 0) -> None:
        """`answer`: how many of the ids, at the end, are to be predicted."""
        for offset, token in enumerate(ids):
            if offset >= len(ids) - answer:
                self.graded.append(len(self.tokens))
                self.groups.append(group)
            self.tokens.append(token)
            self.positions.append((self.next,) * 3)
            self.segment.append(segment)
            self.next += 1

    def picture(self, packer: Packer, rows: int, columns: int) -> None:
        self.add([packer.vision_start])
        for index in range(rows * columns):
            self.slots.append(len(self.tokens))
            self.tokens.append(packer.image)
            self.positions.append((self.next, self.next + index // columns, self.next + index % columns))
            self.segment.append(0)
        self.next += max(rows, columns)
        self.add([packer.vision_end])


def branches(packer: Packer, turns: list[Turn], count: int, grid: Size, system: str | None) -> Sequence:
    """The prefix, then blocks of BLOCK tokens, each with as many whole branches as it holds.

    A turn that is longer than a block is left out.
    """
    sequence = Sequence()
    sequence.add(packer.head(system))
    for _ in range(count):
        sequence.picture(packer, *grid)
    origin = sequence.next
    sequence.prefix = len(sequence.tokens)
    blocks: list[list[tuple[list[int], int]]] = []
    packed = sorted((packer.turn(turn) for turn in turns), key=lambda made: -len(made[0]))
    for made in packed:
        fits = (block for block in blocks if sum(len(ids) for ids, _ in block) + len(made[0]) <= BLOCK)
        block = next(fits, None)
        if block is not None:
            block.append(made)
        elif len(made[0]) <= BLOCK:
            blocks.append([made])
    number = 0
    for block in blocks:
        for ids, answer in block:
            number += 1
            sequence.next = origin
            sequence.add(ids, number, answer, number)
        room = -(len(sequence.tokens) - sequence.prefix) % BLOCK
        sequence.add([0] * room, -1)
    return sequence


def conversation(
    packer: Packer, turns: list[Turn], count: int, grid: Size, system: str | None, text_first: bool
) -> Sequence:
    sequence = Sequence()
    sequence.add(packer.head(system))
    if text_first:
        sequence.add(packer.text(turns[0].question))
    for _ in range(count):
        sequence.picture(packer, *grid)
    for number, turn in enumerate(turns):
        if number:
            sequence.add(packer.again)
        ids, answer = packer.turn(turn, ask=number > 0 or not text_first)
        sequence.add(ids, 0, answer, number)
    return sequence


def collate(sequences: list[Sequence], pictures: list[list[np.ndarray]], pad_to: int = 16) -> Batch:
    """`targets`: (graded, 4): row, index of the state that predicts, token, number of the turn."""
    length = max(len(s.tokens) for s in sequences)
    prefix = sequences[0].prefix
    if not prefix:
        length = -(-length // pad_to) * pad_to
    count = len(sequences)
    tokens = np.zeros((count, length), np.int64)
    segment = np.full((count, length), -1, np.int64)
    positions = np.zeros((3, count, length), np.int64)
    slots, targets = [], []
    for row, s in enumerate(sequences):
        size = len(s.tokens)
        tokens[row, :size], segment[row, :size] = s.tokens, s.segment
        positions[:, row, :size] = np.array(s.positions).T
        slots += [row * length + slot for slot in s.slots]
        targets += [(row, g - 1, s.tokens[g], group) for g, group in zip(s.graded, s.groups, strict=True)]
    return {
        "prefix": np.array(prefix, np.int64),
        "tokens": tokens,
        "segment": segment,
        "positions": positions,
        "slots": np.array(slots, np.int64),
        "targets": np.array(targets, np.int64),
        "images": np.stack([np.stack(p) for p in pictures]) if pictures[0] else np.zeros((0,), np.uint8),
    }


def fitted(image: Image.Image, size: Size) -> np.ndarray:
    """The pixels at (width, height), resized the way that the image processor does."""
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(image)


Dense = dict[str, np.ndarray]
LONGEST_CODE = 6


def _tokens(grid: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """(rows * a, columns * b, ...) to (rows * columns, a * b, ...): what lies under each token."""
    high, wide = grid.shape[0] // rows, grid.shape[1] // columns
    grid = grid.reshape(rows, high, columns, wide, *grid.shape[2:]).swapaxes(1, 2)
    return grid.reshape(rows * columns, high * wide, *grid.shape[4:])


def dense_targets(scene: Scene, size: Size) -> Dense:
    """What each visual token is to know, 0 for nothing.

    patches: (tokens, 4, 2) shape and colour under each patch. centres: (tokens, 4) the shape and colour, as one
    number, of the item whose centre the patch holds; cells: (tokens, 4) its cell. characters: (tokens, 8) per 8x16 pixels.
    counts: (tokens, 4) where an item's centre is: how many items share its colour, its shape, both, and how many
    there are at all; -1 elsewhere. ranks: (tokens, 6) the character that is the first, second, ... of its label. places: (tokens,) cell.
    """
    width, height = size
    rows, columns = height // 32, width // 32
    sx, sy = width / scene.width, height / scene.height
    patches = np.zeros((height // 16, width // 16, 2), np.int64)
    centres = np.zeros((height // 16, width // 16), np.int64)
    cells = np.zeros((height // 16, width // 16), np.int64)
    counts = np.full((rows, columns, 4), -1, np.int64)
    for item in scene.items:
        half = item.size / 2 * 0.8
        left, right = (round((item.x + d) * sx / 16 - 0.5) for d in (-half, half))
        top, bottom = (round((item.y + d) * sy / 16 - 0.5) for d in (-half, half))
        right, bottom = max(right, left), max(bottom, top)
        shape, colour = SHAPES.index(item.shape), COLOUR_NAMES.index(item.colour)
        patches[max(top, 0) : bottom + 1, max(left, 0) : right + 1] = (shape + 1, colour + 1)
        centre = int(item.y * sy // 16), int(item.x * sx // 16)
        centres[centre] = shape * len(COLOUR_NAMES) + colour + 1
        cells[centre] = item.cell + 1
        alike = (
            scene.matching(item.colour),
            scene.matching(shape=item.shape),
            scene.matching(item.colour, item.shape),
        )
        counts[centre[0] // 2, centre[1] // 2] = [*(len(items) for items in alike), len(scene.items)]
    characters = np.zeros((height // 16, width // 8), np.int64)
    ranks = np.zeros((rows, columns, LONGEST_CODE), np.int64)
    for label in scene.labels:
        row = int((label.baseline - label.height / 2) * sy // 16)
        for rank, (character, start, end) in enumerate(glyphs(label)):
            column = int((start + end) / 2 * sx // 8)
            if 0 <= row < height // 16 and 0 <= column < width // 8:
                number = CODE_CHARACTERS.index(character) + 1
                characters[row, column] = number
                ranks[row // 2, column // 4, rank] = number
    y, x = np.mgrid[:rows, :columns]
    places = (2 * y + 1) * 3 // (2 * rows) * 3 + (2 * x + 1) * 3 // (2 * columns)
    return {
        "patches": _tokens(patches, rows, columns),
        "centres": _tokens(centres, rows, columns),
        "cells": _tokens(cells, rows, columns),
        "counts": counts.reshape(-1, 4),
        "characters": _tokens(characters, rows, columns),
        "ranks": ranks.reshape(-1, LONGEST_CODE),
        "places": places.reshape(-1),
    }


def _stacked(dense: list[Dense]) -> Dense:
    return {name: np.concatenate([one[name] for one in dense]) for name in dense[0]}


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


def _system(rng: Random) -> str | None:
    return rng.choice(SYSTEMS) if rng.random() < 0.15 else None


def scene_batch(rng: Random, packer: Packer, size: Size, count: int, asked: int, talk: bool) -> Batch:
    """`count` single images of one size. talk: conversations instead of branches."""
    width, height = size
    system = _system(rng)
    off = rng.random() < 0.2
    sequences, pictures, dense = [], [], []
    while len(sequences) < count:
        drawn = (width + rng.randint(-15, 15), height + rng.randint(-15, 15)) if off else size
        scene = compose(
            rng, max(128, drawn[0]), max(128, drawn[1]), labels=rng.choice((0, 0, 0, 0, 0, 1, 1, 1, 2, 3))
        )
        turns = (
            chat(rng, scene)
            if talk and rng.random() < 0.5
            else tuple(questions(rng, scene, 4 if talk else asked))
        )
        if not turns:
            continue
        grid = (height // 32, width // 32)
        if talk:
            sequences.append(conversation(packer, list(turns), 1, grid, system, rng.random() < 0.4))
        else:
            sequences.append(branches(packer, list(turns), 1, grid, system))
        pictures.append([fitted(draw(scene), size)])
        dense.append(dense_targets(scene, size))
    return collate(sequences, pictures) | _stacked(dense)


def several_batch(rng: Random, packer: Packer, size: Size, count: int, moving: bool) -> Batch:
    """Pairs of images, or frames of a motion; a batch has one number of frames."""
    width, height = size
    frames = rng.choice((3, 4))
    system = _system(rng)
    sequences, pictures, dense = [], [], []
    for _ in range(count):
        if moving:
            scenes, mover, direction = motion_scenes(rng, width, height, frames)
            asked = [ask_motion(rng, mover, direction) for _ in range(4)]
        else:
            *pair, told = pair_scenes(rng, width, height)
            scenes, asked = tuple(pair), [ask_pair(rng, *pair, told) for _ in range(5)]
        turns = list({turn.question: turn for turn in asked}.values())
        sequences.append(branches(packer, turns, len(scenes), (height // 32, width // 32), system))
        pictures.append([fitted(draw(scene), size) for scene in scenes])
        dense += [dense_targets(scene, size) for scene in scenes]
    return collate(sequences, pictures) | _stacked(dense)


def text_batch(rng: Random, packer: Packer, count: int) -> Batch:
    """Small talk without an image."""
    made = [conversation(packer, [small_talk(rng)], 0, (0, 0), _system(rng), False) for _ in range(count)]
    return collate(made, [[] for _ in made])
