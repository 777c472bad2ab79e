"""Rows of queries, keys and values of a head, of which `pages.start` makes first weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model import Text
from pages.state import CIRCLES, CODE, CONSTANT, LABEL_LETTERS, MARK, PICTURE, PLACE, SINK, TEXT

FAST, SLOW = 10, 19
"""Pairs of dimensions that tell neighbours apart, and the first pair that hardly turns within a page."""
HALFWAY = 4.8
"""The value around which the cosines and sines of a place turn."""


def empty(key: Tensor) -> None:
    """Let keys tell the empty token from all others. key: rows of a group of heads."""
    nowhere, blank = slowest(len(key))[:2]
    key[nowhere, SINK] = 2.0
    key[blank, TEXT] = key[blank, PICTURE] = 1.0
    key[blank, SINK] = -CONSTANT / MARK


def idle(query: Tensor, weight: float) -> None:
    """Let visual tokens and the empty token look at the latter.

    query: rows of a head, in which those for bytes are set.
    """
    nowhere = slowest(len(query))[0]
    query[:, SINK] = -query[:, TEXT] * CONSTANT / MARK
    query[nowhere, PICTURE] = weight
    query[nowhere, SINK] += weight


def take_place(rows: Tensor, weight: float) -> Tensor:
    """Let rows of keys or values, (CIRCLES, hidden), hold the place of a visual token."""
    rows[:, PLACE : PLACE + CIRCLES] = weight * torch.eye(CIRCLES)
    rows[:, PICTURE] = -weight * HALFWAY / CONSTANT
    return rows


def compare_labels(rows: Tensor, content: list[int], at: int, weight: float = 1.0) -> None:
    """Let queries or keys hold the letters of a label, each without its case.

    content: the dimensions that are free for this. at: where the label is.
    """
    for number in range(LABEL_LETTERS):
        start, letter = (CODE - 1) * number, at + CODE * number
        rows[content[start : start + CODE - 1], letter : letter + CODE - 1] = weight * torch.eye(CODE - 1)


def back(text: Text, offset: int) -> Tensor:
    """The query, (head_dim,), that fits best to keys that are `offset` tokens of text back.

    A key has the angle 0 in each pair of dimensions, and its position turns it (rotary embeddings). A query
    that begins at the angle of minus `offset` positions agrees with the key that is so far back.
    """
    return sum(turned(text, pair, offset) for pair in range(FAST))


def slowest(size: int) -> list[int]:
    """The dimensions of a head in which content is compared, from the one that turns least."""
    return [half + pair for pair in reversed(range(SLOW, size // 2)) for half in (0, size // 2)]


def turned(text: Text, pair: int, offset: float) -> Tensor:
    """One pair of dimensions of `back`.

    Of every three pairs, one counts tokens of text, one rows of the picture and one columns.
    """
    size = text.config["head_dim"]
    angle = -offset * speed(text, pair)
    query = torch.zeros(size)
    query[pair], query[size // 2 + pair] = math.cos(angle), math.sin(angle)
    return query


def speed(text: Text, pair: int) -> float:
    """The angle by which a position turns a pair of dimensions."""
    turn: float = text.config["rope_parameters"]["rope_theta"] ** (-2 * pair / text.config["head_dim"])
    return turn
