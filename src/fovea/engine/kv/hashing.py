"""Names (hashes) for the blocks of a prefix.

A block's name is the SHA-256 of its parent's name, its token ids and the key of every image it touches. So
two blocks have the same name exactly when everything that their KV depends on is the same. All image
placeholders have the same token id; two images differ only in their keys. A key contains the image's content
hash and the processor settings.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seq

from fovea.engine.sequence import ImageSpan


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
