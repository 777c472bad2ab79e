"""The language of the text layers' states: what each dimension holds, for bytes and for visual tokens."""

from __future__ import annotations

import math

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pages.glyphs import REACH

CODE = 15
"""Size of a letter's vector."""
TEXT, PICTURE = 0, 1
"""Dimensions that are constant for bytes and for visual tokens."""
FLAGS_AT = 2
"""Where the flags of the patches begin (`glyphs.FLAGS`), of each patch all but the first."""
ANCHOR, SINK = 14, 15
"""Dimensions that mark the token before a picture, from which its visual tokens count rows and columns, and
the begin of a message, which stays empty: heads that find nothing look at it."""
SLOTS = [[16 + CODE * (REACH * patch + letter) for letter in range(REACH)] for patch in range(4)]
"""Where the vector of each patch's letters begins in a visual token."""
MEMORY = [16 + CODE * (4 * REACH + back) for back in range(4)]
NEXT = MEMORY[-1] + CODE
LABEL, LABEL_LETTERS = NEXT + CODE, 3
"""The first letters of the label of a value, and of the label that a question names."""
LABELS = (MEMORY[0], MEMORY[3])
"""In a visual token: the labels of what stands in its upper two patches, and in its lower two. What bytes
hold there does not resemble a label."""
CIRCLES = 6
"""Size of a place: cosine and sine of an angle that grows with the row, of one that grows slowly with it, and
of one that grows with the column."""
PLACE = LABELS[1] + LABEL_LETTERS * CODE
"""In a visual token: its place."""
LABEL_AT = tuple(PLACE + CIRCLES * (1 + number) for number in range(3))
"""In a visual token: the places of the labels beside its upper and its lower patches, and above it."""
SPOT = CIRCLES + 1
"""Size of a place that a byte knows: the last number is positive in the upper half of a token."""
FOUND, READING, NAMED_AT, ALSO_NAMED_AT, QUOTED_AT, BEGUN, ALONG = (16 + SPOT * n for n in range(7))
"""In a byte, where visual tokens hold letters: where the last letters stand, and the last dozen; where
two names in the question stand, and what it quotes; where the answer begins; and where it has come to."""
EXACT = [ANCHOR, SINK, *range(FOUND, ALONG + SPOT), *range(PLACE, LABEL_AT[2] + CIRCLES)]
"""Dimensions that begin without any noise."""
KNOWN = (LABEL, *LABELS)
"""Where tokens know the letters of a label: bytes, and the two halves of visual tokens."""
KNOWN_LETTER = 8.0
"""Length of each of them."""
ASCII = range(ord("a"), ord("z") + 1)
CASE = 0.5
"""How far letters that differ only in case are apart: half of it."""
LOUD = 8.0
"""What is built in is so much larger than what layers add in their first steps, which would drown it."""
BYTE, LETTER, CONSTANT = 1.2 * LOUD, 0.5 * LOUD, 0.4 * LOUD
"""Lengths of the vectors of a byte and of a letter, and the value of constant dimensions."""
MARK = 2 * CONSTANT
"""Value of the dimensions that mark a token."""


def codes(made: Tokenizer) -> Tensor:
    """Unit vectors of all tokens, (vocabulary, CODE), that are far from each other.

    Letters that differ only in case differ only in the last dimension: a question names a label in any case.
    """
    count = made.get_vocab_size()
    lower = {made.encode(chr(letter)).ids[-1]: made.encode(chr(letter - 32)).ids[-1] for letter in ASCII}
    rows = [number for number in range(count) if number not in lower.values()]
    vectors = torch.zeros(count, CODE)
    vectors[rows, :-1] = spread(len(rows), CODE - 1)
    for small, large in lower.items():
        vectors[small] *= math.sqrt(1 - CASE**2)
        vectors[large] = vectors[small]
        vectors[small, -1], vectors[large, -1] = CASE, -CASE
    return vectors


def spread(count: int, size: int) -> Tensor:
    """Unit vectors, (count, size), that push each other apart."""
    generator = torch.Generator().manual_seed(1)
    points = torch.nn.functional.normalize(torch.randn(count, size, generator=generator), dim=1)
    with torch.enable_grad():
        points.requires_grad_()
        for _ in range(200):
            close = (12 * (points @ points.T).fill_diagonal_(-1)).exp().sum()
            (gradient,) = torch.autograd.grad(close, points)
            step = points - 0.05 * gradient / gradient.norm(dim=1).max()
            points = torch.nn.functional.normalize(step, dim=1).detach().requires_grad_()
    return points.detach()
