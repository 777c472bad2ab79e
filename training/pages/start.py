"""First weights: heads of the tower that look around, and heads of the text layers that copy what was begun.

The heads of the tower begin by looking at the patches around each one, as a convolution would; a letter
mostly reaches over several patches.

To copy a text, a model must remember the bytes that it has just written, find the same ones in the picture,
and write what follows them there. Layers that begin at random spend most of a short training on discovering
this (source: induction heads, Olsson et al. 2022). Here it is built in, as a first guess that training
changes freely:

- a letter's vector, `codes`, is the same for text and picture. In a visual token, each letter that can be
  read from it has a place of its own (`SLOTS`);
- heads of the first layer remember the last four bytes, in the places `MEMORY`;
- heads of the layers `COPY_LAYERS` compare these bytes with the letters of visual tokens, and pass on the
  letter that follows to the place `NEXT`, which the output reads;
- heads of `LABEL_LAYER` bring the first letters of a label to its value, and those of the label that a
  question names to the start of the answer, both to the place `LABEL`;
- heads of the last layer look for a word to begin with, by its label, and pass on its first letter.
"""

from __future__ import annotations

import math

import torch
from tokenizers import Tokenizer
from torch import Tensor

from model import Fovea, Text, TextAttention
from pages.glyphs import REACH

CODE = 15
"""Size of a letter's vector."""
TEXT, PICTURE = 0, 1
"""Dimensions that are constant for bytes and for visual tokens."""
FLAGS_AT = 2
"""Where the flags of the patches begin (`glyphs.FLAGS`), of each patch all but the first."""
SLOTS = [[16 + CODE * (REACH * patch + letter) for letter in range(REACH)] for patch in range(4)]
"""Where the vector of each patch's letters begins in a visual token."""
MEMORY = [16 + CODE * (4 * REACH + back) for back in range(4)]
NEXT = MEMORY[-1] + CODE
LABEL, LABEL_LETTERS = NEXT + CODE, 3
"""The first letters of the label of a value, and of the label that a question names."""
LABELS = (MEMORY[0], MEMORY[3])
"""In a visual token: the labels of what stands in its upper two patches, and in its lower two. What bytes
hold there does not resemble a label."""
KNOWN = (LABEL, *LABELS)
"""Where tokens know the letters of a label: bytes, and the two halves of visual tokens."""
KNOWN_LETTER = 8.0
"""Length of each of them."""
ASCII = range(ord("a"), ord("z") + 1)
CASE = 0.5
"""How far letters that differ only in case are apart: half of it."""
LABEL_LAYER, COPY_LAYERS = 2, (3, 4)
"""The first of two layers that copy compares with the upper two patches of visual tokens."""
BESIDE, ABOVE, NAMED, ALSO_NAMED = (0, 1), 2, 3, 4
"""The heads of LABEL_LAYER that look at labels: from a value in the upper or lower half of a token to the one
beside it, from a value to the one above it, and from an answer to one or two that the question names."""
POINTERS = (0, 1, 3, 4)
"""The heads of the last layer that look for words to begin with, in each patch of a token."""
FAST, SLOW = 10, 19
"""Pairs of dimensions that tell neighbours apart, and the first pair that hardly turns within a page."""
AROUND = (
    ((0, 1), (0, -1), (1, 0), (-1, 0)),
    ((0, 1), (0, 2), (1, 0), (-1, 0)),
    ((0, 1), (0, 2), (0, 3), (0, -1)),
)
"""Of the heads of the tower's layers, in turn: how many patches down and across they look."""
LEFT, UP, RUN = 6, 10, 3.0
"""How many tokens a label mostly is to the left of its value or above it, and the weight of its being the
begin of a run of words."""
NEAR = 7.0
"""Length of the biases in each pair of dimensions that is used. One patch gets most of a head's weight."""
FIRM = 5.0
"""Factor of what norms or later layers undo: large weights outlast the first steps."""
LOUD = 8.0
"""What is built in is so much larger than what layers add in their first steps, which would drown it."""
BYTE, LETTER, CONSTANT = 1.2 * LOUD, 0.5 * LOUD, 0.4 * LOUD
"""Lengths of the vectors of a byte and of a letter, and the value of constant dimensions."""


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


@torch.no_grad()
def build_in(model: Fovea, vectors: Tensor, starting: Tensor) -> None:
    """Set the first weights of the text layers in place.

    vectors: of all bytes and special tokens, (vocabulary, CODE), bytes by the number of their token.
    starting: see `point`.
    """
    text: Text = model.model["language_model"]
    text.embed_tokens.weight.normal_(std=0.03)
    text.embed_tokens.weight[:, TEXT] = CONSTANT
    text.embed_tokens.weight[: len(vectors), NEXT : NEXT + CODE] = BYTE * vectors
    for layer in text.layers:
        layer.self_attn.o_proj.weight.mul_(0.05)
        layer.mlp.down_proj.weight.mul_(0.1)
    remember(text)
    for index, layer in enumerate(COPY_LAYERS):
        for group in range(2):
            copy(text.layers[layer].self_attn, 2 * index + group, group)
    associate(text)
    point(text.layers[-1].self_attn, starting)
    for layer in text.layers:  # norms follow, so this only makes the first weights last longer
        layer.self_attn.q_proj.weight.mul_(FIRM)
        layer.self_attn.k_proj.weight.mul_(FIRM)
    text.norm.weight.fill_(1 / LOUD)  # the output has the weights of the embeddings
    text.norm.weight[NEXT : NEXT + CODE] = 1.5 / LOUD


def remember(text: Text) -> None:
    """Let heads of the first layer look 1, 2, 3 and 0 bytes back, and clear the place of the next byte."""
    attention = text.layers[0].self_attn
    size = attention.size
    normal = math.sqrt(text.config["hidden_size"] / (BYTE**2 + CONSTANT**2))  # of a byte's embedding
    for group in range(attention.kv_heads):
        rows = slice(group * size, (group + 1) * size)
        key = attention.k_proj.weight[rows].mul_(0.02)
        key[:, TEXT] = key[:, PICTURE] = back(text, 0)
        value = attention.v_proj.weight[rows]
        value[:CODE] = 0
        value[:CODE, NEXT : NEXT + CODE] = FIRM * torch.eye(CODE) / (normal * BYTE)
    for head, offset in enumerate((1, 2, 3, 0)):
        rows = slice(head * size, (head + 1) * size)
        query = attention.q_proj.weight[rows].mul_(0.02)
        query[:, TEXT] = back(text, offset)
        output = attention.o_proj.weight[:, rows]
        output[:, :CODE] = 0
        at = MEMORY[offset]
        output[at : at + CODE, :CODE] = LOUD / FIRM * torch.eye(CODE)
        if not offset:
            output[NEXT : NEXT + CODE, :CODE] = -BYTE / FIRM * torch.eye(CODE)
    attention.q_norm.weight.fill_(2.5)
    attention.k_norm.weight.fill_(2.5)


def copy(attention: TextAttention, patch: int, group: int) -> None:
    """Let the heads of a group compare the last bytes with a patch's letters, each at another alignment."""
    size, heads = attention.size, attention.heads // attention.kv_heads
    nowhere, *content = slowest(size)
    blocks = [content[CODE * number : CODE * (number + 1)] for number in range(REACH - 1)]
    labels = content[CODE * len(blocks) :]
    rows = slice(group * size, (group + 1) * size)
    key, value = attention.k_proj.weight[rows].mul_(0.05), attention.v_proj.weight[rows].mul_(0.2)
    key[nowhere, TEXT] = 4.0
    _compare_labels(key, labels, LABELS[patch // 2], 0.3)
    for number, block in enumerate(blocks):
        at, after = SLOTS[patch][number], SLOTS[patch][number + 1]
        key[block, at : at + CODE] = torch.eye(CODE)
        value[CODE * number : CODE * (number + 1)] = 0
        value[CODE * number : CODE * (number + 1), after : after + CODE] = FIRM / 7 * torch.eye(CODE)
    for last in range(heads):  # the last byte is the patch's first, second or third letter
        columns = slice((group * heads + last) * size, (group * heads + last + 1) * size)
        query = attention.q_proj.weight[columns].mul_(0.05)
        for number in range(last + 1):
            at = MEMORY[last - number]
            query[blocks[number], at : at + CODE] = torch.eye(CODE)
        _compare_labels(query, labels, LABEL, 0.2)
        query[nowhere, TEXT] = math.sqrt(last + 1)
        output = attention.o_proj.weight[:, columns]
        output[:, : 3 * CODE] = 0
        gain = LOUD / FIRM * (0.2, 1.0, 2.0)[last]
        output[NEXT : NEXT + CODE, CODE * last : CODE * (last + 1)] = gain * torch.eye(CODE)
    attention.q_norm.weight.fill_(2.0)
    attention.k_norm.weight.fill_(2.0)


def point(attention: TextAttention, starting: Tensor) -> None:
    """Let four heads look from the start of an answer at beginnings of words, and pass on the first letter.

    Each is for the words that begin in one of the four patches of a token. A word whose label is the one that
    was asked for attracts them most.

    starting: vectors of the last three bytes before an answer, the latest first, (n, 3, CODE): before a text,
        and before a value of a JSON answer.
    """
    size = attention.size
    nowhere, *content = slowest(size)
    for group in range(attention.kv_heads):
        rows = slice(group * size, (group + 1) * size)
        key, value = attention.k_proj.weight[rows].mul_(0.05), attention.v_proj.weight[rows].mul_(0.2)
        key[nowhere, TEXT] = 1.0
        _compare_labels(key, content[2:], LABELS[group], 0.6)
        for number, patch in enumerate((2 * group, 2 * group + 1)):
            word = FLAGS_AT + 3 * patch + 1
            key[content[number], word], key[content[number], word + 1] = 1.5, 3.0
            value[CODE * number : CODE * (number + 1)] = 0
            first = SLOTS[patch][0]
            value[CODE * number : CODE * (number + 1), first : first + CODE] = FIRM / 7 * torch.eye(CODE)
            head = POINTERS[patch]
            columns = slice(head * size, (head + 1) * size)
            query = attention.q_proj.weight[columns].mul_(0.05)
            query[nowhere, TEXT] = 1.0
            _compare_labels(query, content[2:], LABEL, 0.5)
            for at, vector in zip(MEMORY, starting.sum(0), strict=False):
                query[content[number], at : at + CODE] = vector / 2
            output = attention.o_proj.weight[:, columns]
            output[:, : 3 * CODE] = 0
            output[NEXT : NEXT + CODE, CODE * number : CODE * (number + 1)] = LOUD / FIRM * torch.eye(CODE)
    attention.q_norm.weight.fill_(1.5)
    attention.k_norm.weight.fill_(1.5)


def _compare_labels(rows: Tensor, content: list[int], at: int, weight: float = 1.0) -> None:
    """Let queries or keys hold the letters of a label, each without its case.

    content: the dimensions that are free for this. at: where the label is.
    """
    for number in range(LABEL_LETTERS):
        start, letter = (CODE - 1) * number, at + CODE * number
        rows[content[start : start + CODE - 1], letter : letter + CODE - 1] = weight * torch.eye(CODE - 1)


def associate(text: Text) -> None:
    """Let the heads that look at labels pass on their first letters: of the picture, and of the question."""
    attention = text.layers[LABEL_LAYER].self_attn
    size, width = attention.size, LABEL_LETTERS * CODE
    heads = attention.heads // attention.kv_heads
    assert heads == NAMED, "each group of heads reads one of the two"
    shown, named = attention.v_proj.weight.view(attention.kv_heads, size, -1)
    shown[: 2 * width] = named[:width] = 0
    for number in range(LABEL_LETTERS):
        for half in range(2):
            place = slice(half * width + CODE * number, half * width + CODE * (number + 1))
            for patch in (2 * half, 2 * half + 1):
                at = SLOTS[patch][number]
                shown[place, at : at + CODE] = FIRM / 7 * torch.eye(CODE)
        at = MEMORY[LABEL_LETTERS - 1 - number]  # the third letter is the latest
        named[CODE * number : CODE * (number + 1), at : at + CODE] = FIRM / 7 * torch.eye(CODE)
    passed = LOUD / FIRM * torch.eye(width)
    output = attention.o_proj.weight.view(-1, attention.heads, size)
    output[:, :, : 2 * width] = 0
    for half, head in enumerate(BESIDE):
        output[LABELS[half] : LABELS[half] + width, head, half * width : (half + 1) * width] = passed
        for other in range(2):
            place = slice(other * width, (other + 1) * width)
            output[LABELS[half] : LABELS[half] + width, ABOVE, place] = passed
    for head in (NAMED, ALSO_NAMED):
        output[LABEL : LABEL + width, head, :width] = passed
    _look_for_labels(text, attention)


def _look_for_labels(text: Text, attention: TextAttention) -> None:
    """Let a value look at runs of words that begin to the left of it and above it."""
    size = attention.size
    key = attention.k_proj.weight[:size].mul_(0.05)
    along, across, far_along, far_across = (2, 5), (1, 4), (8, 11), (10, 13)
    key[:, PICTURE] = sum(turned(text, pair, 0) for pair in (*along, *across, *far_along, *far_across))
    *begins, nowhere = slowest(size)[:3]  # for runs in upper and in lower patches, and for text
    key[nowhere, TEXT] = RUN
    for patch in range(4):
        key[begins[patch // 2], FLAGS_AT + 3 * patch + 2] = RUN
    for head in (*BESIDE, ABOVE):
        query = attention.q_proj.weight[head * size : (head + 1) * size].mul_(0.05)
        if head == ABOVE:
            pairs = [(pair, 0) for pair in along] + [(pair, UP) for pair in far_across]
        else:
            pairs = [(pair, 0) for pair in across] + [(pair, LEFT) for pair in far_along]
        query[:, PICTURE] = sum(turned(text, *pair) for pair in pairs)
        for half in range(2):
            if head in (ABOVE, BESIDE[half]):
                query[begins[half], PICTURE] = RUN
        query[nowhere, TEXT] = RUN  # bytes have no label here
    for weight in (attention.q_proj.weight[NAMED * size :], attention.k_proj.weight[size:]):
        for row in weight.view(-1, size, weight.shape[1]):  # bytes look at bytes
            row.mul_(0.3)
            row[slowest(size)[0], TEXT] = row[slowest(size)[1], PICTURE] = RUN
    attention.q_norm.weight.fill_(2.0)
    attention.k_norm.weight.fill_(2.0)


def back(text: Text, offset: int) -> Tensor:
    """The query, (head_dim,), that fits best to keys that are `offset` tokens of text back.

    A key has the angle 0 in each pair of dimensions, and its position turns it (rotary embeddings). A query
    that begins at the angle of minus `offset` positions agrees with the key that is so far back.
    """
    return sum(turned(text, pair, offset) for pair in range(FAST))


def slowest(size: int) -> list[int]:
    """The dimensions of a head in which content is compared, from the one that turns least."""
    return [half + pair for pair in reversed(range(SLOW, size // 2)) for half in (0, size // 2)]


def turned(text: Text, pair: int, offset: int) -> Tensor:
    """One pair of dimensions of `back`.

    Of every three pairs, one counts tokens of text, one rows of the picture and one columns.
    """
    size = text.config["head_dim"]
    angle = -offset * text.config["rope_parameters"]["rope_theta"] ** (-2 * pair / size)
    query = torch.zeros(size)
    query[pair], query[size // 2 + pair] = math.cos(angle), math.sin(angle)
    return query


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
        for pair in range(FAST // 2):
            angle = distance * 10000.0 ** (-pair / axis)
            at = number * axis + pair
            query[at], query[half + at] = math.cos(angle), math.sin(angle)
    return query
