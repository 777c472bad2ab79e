"""The pool of KV blocks: who uses which, and which free ones still hold something worth finding.

A block is in exactly one of three states:

    in use     ref > 0                      belongs to that many block tables
    cached     ref = 0, named by a hash     findable; first in, first out of the free queue (LRU)
                                            (by the names of its first rows, too: see `publish_part`)
    blank      ref = 0, without a name

Freeing puts a block at the tail of the queue and keeps its name; taking one from the head forgets its name. So the
whole pool is cache until somebody needs it, and nothing is ever evicted for its own sake.

Blocks that hold a part of an image are counted apart: they are what a follow-up question saves, and what a load of images
costs.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum


class Kind(IntEnum):
    """What a block holds: text that no image follows, text that leads to an image, or a part of an image."""

    TEXT = 0
    LEAD = 1
    VISUAL = 2


class BlockPool:
    """Integers only: the tensors that the numbers index live in the runner. evictions: names lost to what needed the block."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.evictions = 0
        self._refs = [0] * size
        self._kinds = [Kind.TEXT] * size
        self._used_visual = 0
        self._cached_visual = 0
        self._idle = 0
        self._hash_of: list[bytes | None] = [None] * size
        self._by_hash: dict[bytes, int] = {}
        self._parts_of: dict[int, list[bytes]] = {}
        self._by_part: dict[bytes, tuple[int, int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(size))

    @property
    def free(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that a prefix could find, used or not."""
        return len(self._by_hash)

    @property
    def idle(self) -> int:
        """Cached blocks that nobody uses."""
        return self._idle

    @property
    def used_visual(self) -> int:
        """Of the used ones, those with a part of an image."""
        return self._used_visual

    @property
    def cached_visual(self) -> int:
        """Of the cached ones, those with a part of an image."""
        return self._cached_visual

    def next(self) -> int:
        """The block that `take` will give. Raises KeyError when none is free."""
        for block in self._free:
            return block
        raise KeyError("no block is free")

    def take(self, kind: Kind = Kind.TEXT) -> int:
        """The least recently freed block, blank, for what is going to be in it. Raises KeyError when none is free."""
        block, _ = self._free.popitem(last=False)
        self.evictions += self._hash_of[block] is not None
        self._forget(block)
        self._refs[block] = 1
        self._kinds[block] = kind
        self._used_visual += kind is Kind.VISUAL
        return block

    def kind(self, block: int) -> Kind:
        return self._kinds[block]

    def names(self, block: int) -> tuple[bytes | None, tuple[tuple[bytes, int], ...]]:
        """The block's name, if it is full, and those of its first rows."""
        parts = ((name, self._by_part[name][1]) for name in self._parts_of.get(block, ()))
        return self._hash_of[block], tuple(parts)

    def share(self, block: int) -> None:
        """One more table uses it."""
        if self._refs[block] == 0:
            del self._free[block]
            self._idle -= self._hash_of[block] is not None
            self._used_visual += self._kinds[block] is Kind.VISUAL
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One table less. The last one puts it back, name and all."""
        if self._refs[block] <= 0:
            raise RuntimeError(f"block {block} is released but nobody holds it")
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free[block] = None
            self._used_visual -= self._kinds[block] is Kind.VISUAL
            self._idle += self._hash_of[block] is not None
            if self._hash_of[block] is None and block not in self._parts_of:
                self._free.move_to_end(block, last=False)

    def find(self, name: bytes) -> int | None:
        return self._by_hash.get(name)

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def publish(self, block: int, name: bytes) -> None:
        """Give a full block its name. A name that is taken stays with its first block; both are right."""
        if self._hash_of[block] is None and name not in self._by_hash:
            self._hash_of[block] = name
            self._by_hash[name] = block
            self._cached_visual += self._kinds[block] is Kind.VISUAL
            self._idle += self._refs[block] == 0

    def publish_part(self, block: int, name: bytes, rows: int) -> None:
        """Name the first `rows` rows of a block, which are computed and will not be written again."""
        if name not in self._by_part:
            self._by_part[name] = block, rows
            self._parts_of.setdefault(block, []).append(name)

    def find_part(self, name: bytes) -> tuple[int, int] | None:
        """(block, rows) to copy from."""
        return self._by_part.get(name)

    def forget_all(self) -> int:
        """Drop every name; used blocks stay with their sequences. Returns how many names went."""
        names = len(self._by_hash)
        self._hash_of = [None] * self.size
        self._by_hash.clear()
        self._cached_visual = self._idle = 0
        self._by_part.clear()
        self._parts_of.clear()
        return names

    def _forget(self, block: int) -> None:
        """Of a free block."""
        name = self._hash_of[block]
        if name is not None:
            del self._by_hash[name]
            self._hash_of[block] = None
            self._cached_visual -= self._kinds[block] is Kind.VISUAL
            self._idle -= 1
        for part in self._parts_of.pop(block, ()):
            del self._by_part[part]

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Raise RuntimeError unless references, queue and names agree with the block tables given."""
        expected = [0] * self.size
        for table in tables:
            for block in table:
                expected[block] += 1
        if expected != self._refs:
            wrong = [b for b in range(self.size) if expected[b] != self._refs[b]]
            raise RuntimeError(f"blocks {wrong[:8]} are counted wrong: leaked or freed twice")
        if {b for b in range(self.size) if self._refs[b] == 0} != set(self._free):
            raise RuntimeError("the free queue does not hold exactly the unused blocks")
        visual = [b for b in range(self.size) if self._kinds[b] is Kind.VISUAL]
        used, cached = (
            sum(self._refs[b] > 0 for b in visual),
            sum(self._hash_of[b] is not None for b in visual),
        )
        if (used, cached) != (self._used_visual, self._cached_visual):
            raise RuntimeError("blocks of images are counted wrong")
        if self._idle != sum(self._hash_of[block] is not None for block in self._free):
            raise RuntimeError("cached blocks that nobody uses are counted wrong")
        for name, block in self._by_hash.items():
            if self._hash_of[block] != name:
                raise RuntimeError(f"block {block} is findable by a name it does not have")
        if {(part, block) for block, parts in self._parts_of.items() for part in parts} != {
            (part, block) for part, (block, _) in self._by_part.items()
        }:
            raise RuntimeError("the names of parts of blocks do not add up")
