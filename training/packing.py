"""Packed sequences as NumPy arrays: text, and the places of images and of a video's groups, as the engine lays them out.

A sequence holds a prefix with the images or the video and several questions behind it, either as independent branches
(each sees the prefix and itself; positions restart after the prefix) or as one conversation of several turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from fovea.evaluation.scenes.sample import Turn
from model import BLOCK

Batch = dict[str, np.ndarray]
Size = tuple[int, int]


@dataclass(frozen=True)
class Shown:
    """What a prompt shows, of `grid` (rows, columns) tokens each: `images`, and then one video with a group of two
    frames at each of `times`, in seconds. places: (row, column) of the tokens of images that are seen in parts."""

    grid: Size
    images: int = 1
    times: tuple[float, ...] = ()
    places: tuple[tuple[int, int], ...] | None = None


class Packer:
    """Text to packed sequences. Roles and markers follow the chat template exactly."""

    def __init__(self, path: str) -> None:
        self.tokenizer = Tokenizer.from_file(path)
        special = self.tokenizer.token_to_id
        self.image, self.video = special("<|image_pad|>"), special("<|video_pad|>")
        self.start, self.end = special("<|im_start|>"), special("<|im_end|>")
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

    def show(self, packer: Packer, shown: Shown) -> None:
        """Images, then a video as the engine lays it out: all within one more pair of marks, each group after its time."""
        for _ in range(shown.images):
            self.picture(packer, packer.image, *shown.grid, shown.places)
        if not shown.times:
            return
        self.add([packer.vision_start])
        for time in shown.times:
            self.add(packer.text(f"<{time:.1f} seconds>"))
            self.picture(packer, packer.video, *shown.grid)
        self.add([packer.vision_end])

    def picture(
        self,
        packer: Packer,
        token: int,
        rows: int,
        columns: int,
        places: tuple[tuple[int, int], ...] | None = None,
    ) -> None:
        """places: of its tokens, if not one for each of rows x columns."""
        self.add([packer.vision_start])
        for row, column in places or [divmod(index, columns) for index in range(rows * columns)]:
            self.slots.append(len(self.tokens))
            self.tokens.append(token)
            self.positions.append((self.next, self.next + row, self.next + column))
            self.segment.append(0)
        self.next += max(rows, columns)
        self.add([packer.vision_end])


def branches(packer: Packer, turns: list[Turn], shown: Shown, system: str | None) -> Sequence:
    """The prefix, then blocks of BLOCK tokens, each with as many whole branches as it holds.

    A turn that is longer than a block is left out.
    """
    sequence = Sequence()
    sequence.add(packer.head(system))
    sequence.show(packer, shown)
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
    packer: Packer, turns: list[Turn], shown: Shown, system: str | None, text_first: bool
) -> Sequence:
    sequence = Sequence()
    sequence.add(packer.head(system))
    if text_first:
        sequence.add(packer.text(turns[0].question))
    sequence.show(packer, shown)
    for number, turn in enumerate(turns):
        if number:
            sequence.add(packer.again)
        ids, answer = packer.turn(turn, ask=number > 0 or not text_first)
        sequence.add(ids, 0, answer, number)
    return sequence


def collate(sequences: list[Sequence], pictures: list[list[np.ndarray]], pad_to: int = 16) -> Batch:
    """`targets`: (graded, 4): row, index of the state that predicts, token, number of the turn.

    `images`: (sequences, images, height, width, 3), or (sequences, groups, 2, height, width, 3) of a video's frames.
    """
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
