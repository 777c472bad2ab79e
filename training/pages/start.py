"""First weights of the text layers: heads that find what is asked for, and copy it from its place.

To copy a text, a model must remember the bytes that it has just written, find the same ones in the picture,
and write what follows them there (source: induction heads, Olsson et al. 2022). On a page, two or three bytes
are found in many places: the model must also know where it is reading. Layers that begin at random spend most
of a short training on discovering all this. Here it is built in, as a first guess that training changes
freely. What each dimension of a state holds is told in `pages.state`.

- heads of the first layer remember the last four bytes (`remember`);
- visual tokens learn their row and column (`locate`);
- bytes find where the letters that they end with stand on the page (`match`);
- values learn the first letters of their labels, and where these stand (`associate`);
- the start of an answer learns what the question names, and where that stands (`name`);
- it looks for a word to begin with, whose label is the one that was asked for (`point`);
- the bytes of an answer learn where it has come to (`follow`);
- they compare the last bytes with the letters there, and write what follows (`copy`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model import Fovea, Text, TextAttention
from pages.glyphs import REACH
from pages.heads import back, compare_labels, empty, idle, slowest, speed, take_place, turned
from pages.state import (
    ALONG,
    ALSO_NAMED_AT,
    ANCHOR,
    BEGUN,
    BYTE,
    CIRCLES,
    CODE,
    CONSTANT,
    EXACT,
    FLAGS_AT,
    FOUND,
    LABEL,
    LABEL_AT,
    LABEL_LETTERS,
    LABELS,
    LOUD,
    MARK,
    MEMORY,
    NAMED_AT,
    NEXT,
    PICTURE,
    PLACE,
    QUOTED_AT,
    READING,
    SINK,
    SLOTS,
    SPOT,
    TEXT,
)

PLACE_LAYER, MATCH_LAYER, LABEL_LAYER, NAME_LAYER, POINT_LAYER, FOLLOW_LAYER = range(1, 7)
COPY_LAYERS = (7, 8)
"""The first of two layers that copy compares with the upper two patches of visual tokens."""
BESIDE, ABOVE, SMOOTH = (0, 1), 2, 3
"""The heads of LABEL_LAYER. Those of visual tokens look at labels: from a value in the upper or lower half of
a token to the one beside it, and from a value to the one above it. That of bytes looks at the last dozen."""
NAMED, ALSO_NAMED, NAMED_END, ALSO_NAMED_END, QUOTED = 3, 4, 0, 1, 2
"""The heads of NAME_LAYER that look from an answer at one or two names in the question: at the third letter,
and at the byte after the last one; and at the end of what the question quotes."""
POINTERS = (0, 1, 3, 4)
"""The heads of POINT_LAYER that look for words to begin with, in each patch of a token."""
UNSURE, SURE = 1.3, 1.6
"""How much of the last letters must be found, to know the place and to copy: heads that find less look at the
empty token."""
ALIGNED = 0.2, 1.0, 2.0
"""How much counts what follows one, two or three letters."""
STEP = 0.5
"""How much counts where the answer has come to."""
ROWS, ROWS_SLOW, COLUMNS = 1, 10, 8
"""The pairs of dimensions whose angles tell places: a row turns the first by 0.79, the second by 0.09, and a
column the third by 0.15."""
TIMES, LAST, STEPS = (6, 9, 12), (5.0, 0.15), (3.0, 0.3)
"""Pairs of dimensions that count bytes; for the last dozen of bytes and for what was copied last, how many
bytes back the middle lies, and how fast the weight falls from there."""
REGISTERS = (
    (COPY_LAYERS[0], ALONG),
    (FOLLOW_LAYER, BEGUN),
    (POINT_LAYER, NAMED_AT),
    (POINT_LAYER, ALSO_NAMED_AT),
    (POINT_LAYER, QUOTED_AT),
    *((POINT_LAYER, at) for at in LABEL_AT),
)
"""The places that tokens are told to know: the layer that must find them there, and the first dimension."""
LEFT, UP, RUN = 6, 10, 3.0
"""How many tokens a label mostly is to the left of its value or above it, and the weight of its being the
begin of a run of words."""
FIRM = 5.0
"""Factor of what norms or later layers undo: large weights outlast the first steps."""


@torch.no_grad()
def build_in(model: Fovea, vectors: Tensor, starting: Tensor, marks: tuple[int, int]) -> None:
    """Set the first weights of the text layers in place.

    vectors: of all bytes and special tokens, (vocabulary, CODE), bytes by the number of their token.
    starting: see `point`.
    marks: the tokens before a picture and at the begin of a message.
    """
    text: Text = model.model["language_model"]
    text.embed_tokens.weight.normal_(std=0.03)
    text.embed_tokens.weight[marks[1]] = 0
    text.embed_tokens.weight[:, EXACT] = 0
    text.embed_tokens.weight[:, TEXT] = CONSTANT
    text.embed_tokens.weight[: len(vectors), NEXT : NEXT + CODE] = BYTE * vectors
    for dimension, token in zip((ANCHOR, SINK), marks, strict=True):
        text.embed_tokens.weight[token, dimension] = MARK
    for layer in text.layers:
        layer.self_attn.o_proj.weight.zero_()  # the empty token must stay empty
        layer.mlp.down_proj.weight.zero_()
    remember(text, vectors[marks[1]])
    locate(text)
    match(text.layers[MATCH_LAYER].self_attn)
    associate(text)
    name(text.layers[NAME_LAYER].self_attn)
    point(text.layers[POINT_LAYER].self_attn, starting)
    follow(text)
    for index, layer in enumerate(COPY_LAYERS):
        for group in range(2):
            copy(text.layers[layer].self_attn, 2 * index + group, group)
    for index, layer in enumerate(text.layers):  # norms follow, so this only drowns what is not built in
        if index < LABEL_LAYER:
            layer.self_attn.q_proj.weight.mul_(FIRM)
            layer.self_attn.k_proj.weight.mul_(FIRM)
    text.norm.weight.fill_(1 / LOUD)  # the output has the weights of the embeddings
    text.norm.weight[NEXT : NEXT + CODE] = 1.5 / LOUD


def fix(text: Text) -> None:
    """Leave weights as they are that are right from the start, and that training would only blur: of letters
    and of places."""
    for weight in (text.embed_tokens.weight, *text.layers[:LABEL_LAYER].parameters()):
        weight.requires_grad_(False)


def remember(text: Text, begin: Tensor) -> None:
    """Let heads of the first layer look 1, 2, 3 and 0 bytes back, and clear the place of the next byte.

    begin: the vector of the begin of a message, (CODE,), which is not remembered.
    """
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
        value[:CODE, SINK] = -value[:CODE, NEXT : NEXT + CODE] @ begin * (BYTE / MARK)
    for head, offset in enumerate((1, 2, 3, 0)):
        rows = slice(head * size, (head + 1) * size)
        query = attention.q_proj.weight[rows].mul_(0.02)
        query[:, TEXT] = back(text, offset)
        query[:, SINK] = (2 * back(text, 0) - back(text, offset)) * CONSTANT / MARK
        output = attention.o_proj.weight[:, rows]
        output[:, :CODE] = 0
        at = MEMORY[offset]
        output[at : at + CODE, :CODE] = LOUD / FIRM * torch.eye(CODE)
        if not offset:
            output[NEXT : NEXT + CODE, :CODE] = -BYTE / FIRM * torch.eye(CODE)
    attention.q_norm.weight.fill_(2.5)
    attention.k_norm.weight.fill_(2.5)


def locate(text: Text) -> None:
    """Let visual tokens learn their row and column from how far they are from the token before the picture.

    A head's weight on that token, against the begin of the message, is the logistic function of the cosine of
    an angle that grows with the distance (rotary embeddings): nearly the cosine itself.
    """
    attention = text.layers[PLACE_LAYER].self_attn
    size = attention.size
    other, begin = slowest(size)[:2]
    for group in range(attention.kv_heads):
        rows = slice(group * size, (group + 1) * size)
        key, value = attention.k_proj.weight[rows].mul_(0.01), attention.v_proj.weight[rows].mul_(0.2)
        key[other, TEXT] = key[other, PICTURE] = 1.0
        key[:, ANCHOR] = sum(turned(text, pair, 0) for pair in (ROWS, ROWS_SLOW, COLUMNS))
        key[begin, SINK] = 1.0
        key[other, ANCHOR] = key[other, SINK] = -CONSTANT / MARK
        value[0] = 0
        value[0, ANCHOR] = FIRM
    for head, (pair, quarter) in enumerate((pair, q) for pair in (ROWS, ROWS_SLOW, COLUMNS) for q in (0, 1)):
        query = attention.q_proj.weight[head * size : (head + 1) * size].mul_(0.01)
        query[:, PICTURE] = turned(text, pair, quarter * math.pi / 2 / speed(text, pair))
        query[other, PICTURE] = -8.0
        query[other, TEXT] = 8.0
        query[other, SINK], query[begin, SINK] = -8.0 * CONSTANT / MARK, 8.0
        output = attention.o_proj.weight[:, head * size : (head + 1) * size]
        output[:, 0] = 0
        output[PLACE + head, 0] = 1.2 / FIRM
    attention.q_norm.weight.fill_(1.0)
    attention.k_norm.weight.fill_(1.0)


def match(attention: TextAttention) -> None:
    """Let bytes find where the letters that they end with stand: two to four of them, without case.

    The heads of the first group compare them with the upper patches of visual tokens, those of the second
    with the lower ones. What is found in several places has little weight: the cosines cancel each other.
    """
    size, letters = attention.size, CODE - 1
    nowhere, _, *content = slowest(size)
    blocks = [content[letters * number : letters * (number + 1)] for number in range(REACH)]
    for group in range(attention.kv_heads):
        rows = slice(group * size, (group + 1) * size)
        key, value = attention.k_proj.weight[rows].mul_(0.05), attention.v_proj.weight[rows].mul_(0.2)
        empty(key)
        for patch in (2 * group, 2 * group + 1):
            for block, at in zip(blocks, SLOTS[patch], strict=True):
                key[block, at : at + letters] = torch.eye(letters)
        value[:SPOT] = 0
        take_place(value[:CIRCLES], FIRM)
        value[CIRCLES, PICTURE] = FIRM * (0.3, -0.3)[group]
        for head in range(3):
            last = head + 1
            columns = slice((3 * group + head) * size, (3 * group + head + 1) * size)
            query = attention.q_proj.weight[columns].mul_(0.05)
            for number in range(last + 1):
                at = MEMORY[last - number]
                query[blocks[number], at : at + letters] = torch.eye(letters)
            query[nowhere, TEXT] = UNSURE * math.sqrt(last + 1)
            idle(query, 4.0)
            output = attention.o_proj.weight[:, columns]
            output[:, :SPOT] = 0
            gain = (0.5, 1.5, 3.0)[head] / FIRM
            output[FOUND : FOUND + SPOT, :SPOT] = gain * torch.eye(SPOT)
    attention.q_norm.weight.fill_(2.0)
    attention.k_norm.weight.fill_(2.0)


def copy(attention: TextAttention, patch: int, group: int) -> None:
    """Let the heads of a group compare the last bytes with a patch's letters, each at another alignment.

    Of patches with the same letters, the one counts that is near to where the answer has come to.
    """
    size, heads = attention.size, attention.heads // attention.kv_heads
    nowhere, _, *content = slowest(size)
    blocks = [content[CODE * number : CODE * (number + 1)] for number in range(REACH - 1)]
    spot = content[CODE * len(blocks) :][:CIRCLES]
    rows = slice(group * size, (group + 1) * size)
    key, value = attention.k_proj.weight[rows].mul_(0.05), attention.v_proj.weight[rows].mul_(0.2)
    empty(key)
    key[spot] = take_place(key[spot], 1.0)
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
        query[spot, ALONG : ALONG + CIRCLES] = torch.eye(CIRCLES)
        query[nowhere, TEXT] = SURE * math.sqrt(last + 1)
        query[nowhere, ALONG + CIRCLES] = -0.3 if patch < 2 else 0.3
        idle(query, 4.0)
        output = attention.o_proj.weight[:, columns]
        output[:, : 3 * CODE] = 0
        gain = LOUD / FIRM * ALIGNED[last]
        output[NEXT : NEXT + CODE, CODE * last : CODE * (last + 1)] = gain * torch.eye(CODE)
    attention.q_norm.weight.fill_(2.0)
    attention.k_norm.weight.fill_(2.0)
    _sharpen(attention, spot, (2.0, 1.0, 1.5))


def point(attention: TextAttention, starting: Tensor) -> None:
    """Let four heads look from the start of an answer at beginnings of words, and pass on the first letter.

    Each is for the words that begin in one of the four patches of a token. A word whose label is the one that
    was asked for attracts them most.

    starting: vectors of the last three bytes before an answer, the latest first, (n, 3, CODE): before a text,
        and before a value of a JSON answer.
    """
    size = attention.size
    nowhere, _, *content = slowest(size)
    for group in range(attention.kv_heads):
        rows = slice(group * size, (group + 1) * size)
        key, value = attention.k_proj.weight[rows].mul_(0.05), attention.v_proj.weight[rows].mul_(0.2)
        empty(key)
        compare_labels(key, content[2:], LABELS[group], 0.6)
        labelled = content[2 + LABEL_LETTERS * (CODE - 1) :]
        spots = [labelled[CIRCLES * number :][:CIRCLES] for number in range(3)]
        for spot, at in zip(spots, (LABEL_AT[group], LABEL_AT[2]), strict=False):
            key[spot, at : at + CIRCLES] = torch.eye(CIRCLES)
        key[spots[2]] = take_place(key[spots[2]], 1.0)
        value[2 * CODE : 2 * CODE + SPOT] = 0
        take_place(value[2 * CODE : 2 * CODE + CIRCLES], FIRM)
        value[2 * CODE + CIRCLES, PICTURE] = FIRM * (0.3, -0.3)[group]
        for number, patch in enumerate((2 * group, 2 * group + 1)):
            word = FLAGS_AT + 3 * patch + 1
            key[content[number], word], key[content[number], word + 1] = 1.5, 3.0
            value[CODE * number : CODE * (number + 1)] = 0
            first = SLOTS[patch][0]
            value[CODE * number : CODE * (number + 1), first : first + CODE] = FIRM / 7 * torch.eye(CODE)
            head = POINTERS[patch]
            columns = slice(head * size, (head + 1) * size)
            query = attention.q_proj.weight[columns].mul_(0.05)
            query[nowhere, TEXT] = 10.0
            idle(query, 10.0)
            compare_labels(query, content[2:], LABEL, 0.5)
            for spot, at in zip(spots, (NAMED_AT, ALSO_NAMED_AT, QUOTED_AT), strict=True):
                query[spot, at : at + CIRCLES] = torch.eye(CIRCLES)
            for at, vector in zip(MEMORY, starting.sum(0), strict=False):
                query[content[number], at : at + CODE] = vector / 2
                query[nowhere, at : at + CODE] = -10.0 * CONSTANT / 24 * vector
            output = attention.o_proj.weight[:, columns]
            output[:, : 3 * CODE] = 0
            output[NEXT : NEXT + CODE, CODE * number : CODE * (number + 1)] = LOUD / FIRM * torch.eye(CODE)
            output[BEGUN : BEGUN + SPOT, 2 * CODE : 2 * CODE + SPOT] = 1 / FIRM * torch.eye(SPOT)
    attention.q_norm.weight.fill_(1.5)
    attention.k_norm.weight.fill_(1.5)
    for spot, factors in zip(spots, ((1.5, 1.0, 1.0), (1.5, 1.0, 1.0), (2.5, 2.0, 2.5)), strict=True):
        _sharpen(attention, spot, factors)


def _sharpen(attention: TextAttention, spot: list[int], factors: tuple[float, float, float]) -> None:
    """Let places count more when queries and keys are compared.

    spot: the dimensions of a place. factors: for the angles of rows, of rows far away, and of columns.
    """
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight[spot] *= torch.tensor(factors).repeat_interleave(2)


def associate(text: Text) -> None:
    """Let values learn the first letters of their labels and where these stand, and bytes where the last
    dozen of bytes stands."""
    attention = text.layers[LABEL_LAYER].self_attn
    size, width = attention.size, LABEL_LETTERS * CODE
    shown, bytes_ = attention.v_proj.weight.view(attention.kv_heads, size, -1)
    shown[: 2 * width + CIRCLES] = bytes_[:SPOT] = 0
    for number in range(LABEL_LETTERS):
        for half in range(2):
            place = slice(half * width + CODE * number, half * width + CODE * (number + 1))
            for patch in (2 * half, 2 * half + 1):
                at = SLOTS[patch][number]
                shown[place, at : at + CODE] = FIRM / 7 * torch.eye(CODE)
    where = slice(2 * width, 2 * width + CIRCLES)
    take_place(shown[where], FIRM)
    bytes_[:SPOT, FOUND : FOUND + SPOT] = FIRM * torch.eye(SPOT)
    passed = LOUD / FIRM * torch.eye(width)
    output = attention.o_proj.weight.view(-1, attention.heads, size)
    output[:, :SMOOTH, : 2 * width + CIRCLES] = 0
    for half, head in enumerate(BESIDE):
        output[LABELS[half] : LABELS[half] + width, head, half * width : (half + 1) * width] = passed
        for other in range(2):
            place = slice(other * width, (other + 1) * width)
            output[LABELS[half] : LABELS[half] + width, ABOVE, place] = passed
    for head, at in zip((*BESIDE, ABOVE), LABEL_AT, strict=True):
        output[at : at + CIRCLES, head, where] = 2 / FIRM * torch.eye(CIRCLES)
    output[:, SMOOTH, :SPOT] = 0
    output[READING : READING + SPOT, SMOOTH, :SPOT] = 2 / FIRM * torch.eye(SPOT)
    _look_for_labels(text, attention)
    _look_back(text, attention, SMOOTH, *LAST)
    attention.q_norm.weight.fill_(2.0)
    attention.k_norm.weight.fill_(2.0)


def name(attention: TextAttention) -> None:
    """Let bytes look at what names a label in the question, for its first letters and where it stands."""
    size, heads = attention.size, attention.heads // attention.kv_heads
    ended, named = attention.v_proj.weight.view(attention.kv_heads, size, -1)
    width = LABEL_LETTERS * CODE
    ended[:SPOT] = named[:width] = 0
    ended[:SPOT, READING : READING + SPOT] = FIRM * torch.eye(SPOT)
    for number in range(LABEL_LETTERS):
        at = MEMORY[LABEL_LETTERS - 1 - number]  # the third letter is the latest
        named[CODE * number : CODE * (number + 1), at : at + CODE] = FIRM / 7 * torch.eye(CODE)
    output = attention.o_proj.weight.view(-1, attention.heads, size)
    for head in (NAMED, ALSO_NAMED):
        output[:, head, :width] = 0
        output[LABEL : LABEL + width, head, :width] = 0.6 * LOUD / FIRM * torch.eye(width)
    for head, at in enumerate((NAMED_AT, ALSO_NAMED_AT, QUOTED_AT)):
        output[:, head, :SPOT] = 0
        output[at : at + SPOT, head, :SPOT] = 2 / FIRM * torch.eye(SPOT)
    byte = slowest(size)[2]
    for key in attention.k_proj.weight.view(attention.kv_heads, size, -1).mul_(0.3):
        empty(key)
        key[byte, TEXT], key[byte, SINK] = RUN, -RUN * CONSTANT / MARK
    for query in attention.q_proj.weight.view(attention.heads, size, -1).mul_(0.3):
        query[byte, TEXT] = RUN
        idle(query, RUN)
    attention.q_norm.weight.fill_(2.0)
    attention.k_norm.weight.fill_(2.0)
    assert heads == NAMED, "each group of heads reads one of the two"


def follow(text: Text) -> None:
    """Let bytes learn where the answer has come to: where its last bytes were found, and where it began."""
    attention = text.layers[FOLLOW_LAYER].self_attn
    value = attention.v_proj.weight[: attention.size]
    value[:SPOT] = 0
    value[:SPOT, FOUND : FOUND + SPOT] = FIRM * torch.eye(SPOT)
    value[:SPOT, BEGUN : BEGUN + SPOT] = FIRM * torch.eye(SPOT)
    output = attention.o_proj.weight[:, : attention.size]
    output[:, :SPOT] = 0
    output[ALONG : ALONG + SPOT, :SPOT] = STEP / FIRM * torch.eye(SPOT)
    _look_back(text, attention, 0, *STEPS)
    attention.q_norm.weight.fill_(2.0)
    attention.k_norm.weight.fill_(2.0)


def _look_back(text: Text, attention: TextAttention, head: int, back: float, sharp: float) -> None:
    """Let a head look at the bytes around `back` bytes ago."""
    size = attention.size
    group = head // (attention.heads // attention.kv_heads)
    byte = slowest(size)[2]
    key = attention.k_proj.weight[group * size : (group + 1) * size].mul_(0.05)
    empty(key)
    key[:, TEXT] = sum(turned(text, pair, 0) for pair in TIMES)
    key[byte, TEXT] = 1.0
    key[byte, SINK] = -CONSTANT / MARK
    query = attention.q_proj.weight[head * size : (head + 1) * size].mul_(0.05)
    query[:, TEXT] = sharp * sum(turned(text, pair, back) for pair in TIMES)
    query[byte, TEXT] = 1.0
    idle(query, 3.0)


def _look_for_labels(text: Text, attention: TextAttention) -> None:
    """Let a value look at runs of words that begin to the left of it and above it."""
    size = attention.size
    key = attention.k_proj.weight[:size].mul_(0.05)
    along, across, far_along, far_across = (2, 5), (1, 4), (8, 11), (10, 13)
    key[:, PICTURE] = sum(turned(text, pair, 0) for pair in (*along, *across, *far_along, *far_across))
    nowhere, _, *begins = slowest(size)[:4]  # the last two: for runs in upper and in lower patches
    empty(key)
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
        query[nowhere, TEXT] = query[nowhere, SINK] = RUN  # bytes have no label here
