"""First weights of the tower: heads that look at the patches around each one, as a convolution would.

A letter mostly reaches over several patches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model import Fovea

AROUND = (
    ((0, 1), (0, -1), (1, 0), (-1, 0)),
    ((0, 1), (0, 2), (1, 0), (-1, 0)),
    ((0, 1), (0, 2), (0, 3), (0, -1)),
)
"""Of the heads of the tower's layers, in turn: how many patches down and across they look."""
NEAR = 7.0
"""Length of the biases in each pair of dimensions that is used. One patch gets most of a head's weight."""
FAST = 5
"""Pairs of dimensions of each axis that tell neighbours apart."""


@torch.no_grad()
def look_around(model: Fovea) -> None:
    """Let the heads of the tower begin with the patches around each one, by biases of queries and keys."""
    vision = model.model["visual"]
    hidden, heads = vision.config["hidden_size"], vision.config["num_heads"]
    size = hidden // heads
    for index, block in enumerate(vision.blocks):
        block.attn.qkv.weight[: 2 * hidden].mul_(0.3)
        for head, offset in enumerate(AROUND[index % len(AROUND)]):
            rows = slice(head * size, (head + 1) * size)
            block.attn.qkv.bias[:hidden][rows] = NEAR * nearby(size, offset)
            block.attn.qkv.bias[hidden : 2 * hidden][rows] = NEAR * nearby(size, (0, 0))


def nearby(size: int, offset: tuple[int, int]) -> Tensor:
    """The query, (head_dim,), that fits best to keys that are `offset` patches further down and across."""
    axis, half = size // 4, size // 2
    query = torch.zeros(size)
    for number, distance in enumerate(offset):
        for pair in range(FAST):
            angle = distance * 10000.0 ** (-pair / axis)
            at = number * axis + pair
            query[at], query[half + at] = math.cos(angle), math.sin(angle)
    return query
