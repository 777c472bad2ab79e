"""Names (hashes) of prefixes: of whole blocks, and of the first rows of a block.

A block's name is the SHA-256 of its parent's name, its token ids and the key of every image it touches. So
two blocks have the same name exactly when everything that their KV depends on is the same. All image
placeholders have the same token id; two images differ only in their keys. A key contains the image's content
hash and the processor settings.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seq
from functools import lru_cache

from fovea.engine.sequence import ImageSpan, Sequence


def root_hash(salt: str, generation: int = 0) -> bytes:
    """The parent name of a first block.

    Different salts (tenants) have disjoint chains, and so have generations.

    generation: number of the interval of time in which the request arrived; see `ttl_s` of `KVManager`.
    """
    return hashlib.sha256(b"fovea-kv:%d:" % generation + salt.encode()).digest()


def block_hash(parent: bytes, tokens: Seq[int], start: int, spans: Seq[ImageSpan]) -> bytes:
    """The name of the block that holds `tokens` from position `start` on, after the block named `parent`.

    spans: the image spans of the prompt; those that do not touch the block are ignored.
    """
    digest = hashlib.sha256(parent)
    digest.update(struct.pack(f"<q{len(tokens)}q", len(tokens), *tokens))
    end = start + len(tokens)
    for span in spans:
        if span.start < end and span.end > start:
            key = span.key.encode()
            digest.update(struct.pack("<qq", span.start - start, len(key)))
            digest.update(key)
    return digest.digest()


@lru_cache(4096)
def mm_hash(key: str) -> str:
    """The public name of an image span: 16 hexadecimal digits of the SHA-256 of the span's key, and 48 zeros.

    Renders and KV events name images by it, so that a router can tell which engine has an image's blocks. A
    key contains the image's identity, the plan and the salt; its hash says nothing about them to a reader who
    does not know them already. It is in the form in which Dynamo's routers know images (other names they
    take for text, so that all images of a size are alike to them); for other routers any text will do. It is
    no key of a cache: if two images had one name, a request might be sent to the wrong engine, no more.
    """
    return hashlib.sha256(key.encode()).hexdigest()[:16].ljust(64, "0")


class PrefixNames:
    """Calculates names, see `hashing`. The names of whole blocks are kept in `Sequence.block_hashes`.

    block_size: tokens per block.
    ttl_s: length of a generation of prefixes in seconds; 0 for no limit. Sequences of different generations
        share no names. A sequence's generation is its arrival time divided by `ttl_s`, rounded down.
    """

    def __init__(self, block_size: int, ttl_s: int = 0) -> None:
        self.block_size = block_size
        self._ttl_s = ttl_s

    def fill(self, seq: Sequence, count: int) -> None:
        """Calculate the names of the first `count` blocks. All of their tokens must be known."""
        size = self.block_size
        while len(seq.block_hashes) < count:
            start = len(seq.block_hashes) * size
            parent = self.parent(seq, len(seq.block_hashes))
            spans = seq.spans_between(start, start + size)
            seq.block_hashes.append(block_hash(parent, seq.tokens(start, start + size), start, spans))

    def parent(self, seq: Sequence, index: int) -> bytes:
        """The name after which the names in block `index` continue. The blocks before must have names."""
        if index:
            return seq.block_hashes[index - 1]
        return root_hash(seq.salt, int(seq.arrival // self._ttl_s) if self._ttl_s else 0)

    def at(self, seq: Sequence, position: int) -> bytes:
        """The name of the first `position` tokens, which must be known."""
        index, rows = divmod(position, self.block_size)
        self.fill(seq, index)
        if not rows:
            return self.parent(seq, index)
        start = position - rows
        spans = seq.spans_between(start, position)
        return block_hash(self.parent(seq, index), seq.tokens(start, position), start, spans)

    def image_ends(self, seq: Sequence, index: int, limit: int) -> list[tuple[int, bytes]]:
        """(rows, name) for each image that ends inside block `index`, up to position `limit`."""
        start = index * self.block_size
        ends = [span.end for span in seq.spans_between(start, start + self.block_size)]
        inside = [end for end in ends if end < start + self.block_size and end <= limit]
        return [(end - start, self.at(seq, end)) for end in inside]
