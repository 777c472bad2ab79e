"""The values that engines hand over, and their names.

A name is a hash of everything that decides the bits of a value: what both engines have in common (`layout`),
and the name that the value has in the caches of one engine, which is a hash of contents in turn. So one that
asks knows the names of everything that it may get, and takes nothing else. Salts are in the hashes alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from fovea.engine.kv.manager import KVManager
from fovea.engine.sequence import ImageSpan
from fovea.engine.sequence import Sequence as TokenSequence

Kind = Literal["block", "window", "state", "output"]


class Value(NamedTuple):
    """A value that one engine offers, or another one wants.

    kind: "block": keys and values of a block, or of its first rows. "window": the same for layers with a
        sliding window. "state": the states after a prefix. "output": the encoder's output of an image.
    name: hex digits.
    position: tokens of the prefix that ends with the value; 0 of an output.
    key: of an output in the caches; "" of others.
    rows: rows of an output; 0 of others.
    """

    kind: Kind
    name: str
    position: int = 0
    key: str = ""
    rows: int = 0


def output_value(layout: str, key: str, rows: int) -> Value:
    """Return the value of an image's encoder output. rows: rows of the output."""
    return Value("output", _name(layout, "output", key.encode()), key=key, rows=rows)


def prefix_values(layout: str, kv: KVManager, seq: TokenSequence, first: int) -> Iterator[Value]:
    """Yield what another engine needs to compute only the last tokens of a prompt, in the order of tokens.

    first: tokens whose keys and values it has already.
    """
    size, last = kv.block_size, len(seq.prompt_ids) - 1
    kv.names.fill(seq, last // size)
    for index in range(first // size, last // size):
        name = seq.block_hashes[index]
        yield Value("block", _name(layout, "block", name), (index + 1) * size)
        if kv.window is not None:
            yield Value("window", _name(layout, "window", name), (index + 1) * size)
    ends = [last // size * size + rows for rows, _ in kv.names.image_ends(seq, last // size, last)]
    if kv.states is not None:
        ends = [last] if last % size else []
    for position in ends:
        name = kv.names.at(seq, position)
        yield Value("block", _name(layout, "block", name), position)
        if kv.window is not None:
            yield Value("window", _name(layout, "window", name), position)
    if kv.states is not None and last:
        yield Value("state", _name(layout, "state", kv.names.at(seq, last)), last)


def needed_outputs(
    kv: KVManager, seq: TokenSequence, spans: Sequence[ImageSpan], *, lasting: bool
) -> list[ImageSpan]:
    """Return the images whose encoder outputs an engine needs although it gets all of `prefix_values`.

    lasting: every token of an answer reads them.
    """
    if lasting:
        return list(spans)
    last = len(seq.prompt_ids) - 1
    begin = last // kv.block_size * kv.block_size
    whole = kv.window is not None or kv.whole_images
    if not whole:
        return [span for span in spans if span.end > last]
    return [span for span in spans if span.end > begin]


def _name(layout: str, kind: Kind, name: bytes) -> str:
    return hashlib.sha256(f"{layout}:{kind}:".encode() + name).hexdigest()
