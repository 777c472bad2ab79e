"""Packs text, images and videos into sequences of NumPy arrays, laid out like the engine does it.

A sequence is a prefix with the images or the video, and several questions after it. The questions are either
independent branches (each attends to the prefix and itself, and its positions start after the prefix) or one
conversation of several turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from fovea.evaluation.scenes.scene import Turn
from model import BLOCK

Batch = dict[str, np.ndarray]
Size = tuple[int, int]


@dataclass(frozen=True)
class PromptMedia:
    """The images and the video of a prompt. Images come before the video.

    grid: rows and columns of tokens of each image and each group of frames.
    images: number of images.
    times: time of each group of two frames in the video, in seconds; (): no video.
    places: row and column of each token, for images that are encoded in parts; None: all tokens of the grid.
    """

    grid: Size
    images: int = 1
    times: tuple[float, ...] = ()
    places: tuple[tuple[int, int], ...] | None = None


class Packer:
    """Tokenizes the parts of a prompt. Roles and markers follow the chat template exactly."""

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
        """Ids of question and answer, and the length of the answer with its <|im_end|>.

        ask: whether the ids begin with the question.
        """
        answer = [*self.text(turn.answer), self.end]
        said = turn.question if turn.role == "user" else f"<tool_response>{turn.question}</tool_response>"
        question = self.text(said) if ask else []
        return [*question, *self.assistant, *answer], len(answer)


class Sequence:
    """One packed sequence under construction.

    tokens: ids.
    positions: M-RoPE position of each token.
    segment: branch of each token; 0 is the prefix, -1 padding.
    target_indices: indices of the tokens that are to be predicted.
    groups: for each of these, the number of its turn.
    slots: indices of the visual tokens.
    next: position of the next text token.
    prefix: length of the prefix; 0 for a conversation.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[tuple[int, int, int]] = []
        self.segment: list[int] = []
        self.target_indices: list[int] = []
        self.groups: list[int] = []
        self.slots: list[int] = []
        self.next = 0
        self.prefix = 0

    def add(self, ids: list[int], segment: int = 0, answer: int = 0, group: int = 0) -> None:
        """Append text. answer: how many of the last ids are to be predicted. group: number of the turn."""
        for offset, token in enumerate(ids):
            if offset >= len(ids) - answer:
                self.target_indices.append(len(self.tokens))
                self.groups.append(group)
            self.tokens.append(token)
            self.positions.append((self.next,) * 3)
            self.segment.append(segment)
            self.next += 1

    def show(self, packer: Packer, media: PromptMedia) -> None:
        """Append the images, then the video.

        A video has one more pair of vision marks around all of it, and each group follows its time.
        """
        for _ in range(media.images):
            self.picture(packer, packer.image, *media.grid, media.places)
        if not media.times:
            return
        self.add([packer.vision_start])
        for time in media.times:
            self.add(packer.text(f"<{time:.1f} seconds>"))
            self.picture(packer, packer.video, *media.grid)
        self.add([packer.vision_end])

    def picture(
        self,
        packer: Packer,
        token: int,
        rows: int,
        columns: int,
        places: tuple[tuple[int, int], ...] | None = None,
    ) -> None:
        """Append the visual tokens of one image or group.

        places: row and column of each token; None: rows x columns tokens.
        """
        self.add([packer.vision_start])
        for row, column in places or [divmod(index, columns) for index in range(rows * columns)]:
            self.slots.append(len(self.tokens))
            self.tokens.append(token)
            self.positions.append((self.next, self.next + row, self.next + column))
            self.segment.append(0)
        self.next += max(rows, columns)
        self.add([packer.vision_end])


def branches(packer: Packer, turns: list[Turn], media: PromptMedia, system: str | None) -> Sequence:
    """Pack questions as independent branches: the prefix, then blocks of BLOCK tokens with whole branches in
    them.

    A turn that is longer than a block is left out.
    """
    sequence = Sequence()
    sequence.add(packer.head(system))
    sequence.show(packer, media)
    origin = sequence.next
    sequence.prefix = len(sequence.tokens)
    blocks: list[list[tuple[list[int], int]]] = []
    packed_turns = sorted((packer.turn(turn) for turn in turns), key=lambda packed_turn: -len(packed_turn[0]))
    for packed_turn in packed_turns:
        fits = (block for block in blocks if sum(len(ids) for ids, _ in block) + len(packed_turn[0]) <= BLOCK)
        block = next(fits, None)
        if block is not None:
            block.append(packed_turn)
        elif len(packed_turn[0]) <= BLOCK:
            blocks.append([packed_turn])
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
    packer: Packer, turns: list[Turn], media: PromptMedia, system: str | None, text_first: bool
) -> Sequence:
    """Pack turns as one conversation. text_first: the first question precedes the images."""
    sequence = Sequence()
    sequence.add(packer.head(system))
    if text_first:
        sequence.add(packer.text(turns[0].question))
    sequence.show(packer, media)
    for number, turn in enumerate(turns):
        if number:
            sequence.add(packer.again)
        ids, answer = packer.turn(turn, ask=number > 0 or not text_first)
        sequence.add(ids, 0, answer, number)
    return sequence


def collate(sequences: list[Sequence], pictures: list[list[np.ndarray]], pad_to: int = 16) -> Batch:
    """Collate sequences into one batch.

    prefix: length of the prefix of all sequences.
    tokens, segment: (sequences, length). positions: (3, sequences, length).
    slots: flat indices of the visual tokens.
    targets: (tokens to predict, 4): row, index of the state that predicts, token, number of the turn.
    images: (sequences, images, height, width, 3), or (sequences, groups, 2, height, width, 3) for a video.
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
        targets += [
            (row, g - 1, s.tokens[g], group) for g, group in zip(s.target_indices, s.groups, strict=True)
        ]
    return {
        "prefix": np.array(prefix, np.int64),
        "tokens": tokens,
        "segment": segment,
        "positions": positions,
        "slots": np.array(slots, np.int64),
        "targets": np.array(targets, np.int64),
        "images": np.stack([np.stack(p) for p in pictures]) if pictures[0] else np.zeros((0,), np.uint8),
    }
