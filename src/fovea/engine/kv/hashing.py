"""Names for blocks of a prefix.

A block's name is the SHA-256 of its parent's name, its token ids and the identity of every image it touches, so two
blocks share a name exactly when everything that shaped their KV is the same. Image placeholders are all the same token
id, so an image's key (which holds its content hash and its processor settings) is what tells two pictures apart.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seq

from fovea.engine.sequence import ImageSpan


def root_hash(salt: str, generation: int = 0) -> bytes:
    """The parent of a first block. Tenants with different salts have disjoint chains, and so have generations."""
    return hashlib.sha256(b"fovea-kv:%d:" % generation + salt.encode()).digest()


def block_hash(parent: bytes, tokens: Seq[int], start: int, spans: Seq[ImageSpan]) -> bytes:
    """Name of the block that holds `tokens` from position `start` on, after `parent`."""
    digest = hashlib.sha256(parent)
    digest.update(struct.pack(f"<q{len(tokens)}q", len(tokens), *tokens))
    end = start + len(tokens)
    for span in spans:
        if span.start < end and span.end > start:
            key = span.key.encode()
            digest.update(struct.pack("<qq", span.start - start, len(key)))
            digest.update(key)
    return digest.digest()
