"""The pool of KV blocks: how many sequences use each block, and which free blocks still hold reusable KV.

A block is in exactly one of three states:

    in use     ref > 0                      belongs to `ref` block tables
    idle       ref = 0, has a name (hash)   can be found by its name
    blank      ref = 0, has no name         can only be taken

The first rows of a block can have names of their own (see `publish_part`), and be found by these in every
state. Releasing a block keeps its names. It puts a block with a name at the tail of the free queue, and one
without at the head. Taking the block at the head of the queue removes its names. So every free block serves
as cache until its memory is needed, and a block is evicted only when a sequence takes it.

Blocks that hold a part of an image are counted separately: a follow-up question reuses them, and images fill
the pool with them.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum


class Kind(IntEnum):
    """The content of a block.

    TEXT: text that no image follows.
    LEAD: text before an image.
    VISUAL: a part of an image.
    """

    TEXT = 0
    LEAD = 1
    VISUAL = 2


class BlockPool:
    """The state of every KV block, as integers only; the runner owns the tensors that the numbers index.

    size: number of blocks.
    evictions: named blocks that lost their name because a sequence took the block.
    """

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
        """Number of blocks that can be taken now, cached ones included."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    @property
    def cached(self) -> int:
        """Number of full blocks that have a name, in use or not."""
        return len(self._by_hash)

    @property
    def idle(self) -> int:
        """Number of named blocks that no sequence uses."""
        return self._idle

    @property
    def used_visual(self) -> int:
        """Number of blocks in use that hold a part of an image."""
        return self._used_visual

    @property
    def cached_visual(self) -> int:
        """Number of named blocks that hold a part of an image."""
        return self._cached_visual

    def next(self) -> int:
        """Return the block that `take` will return. Raises KeyError when no block is free."""
        for block in self._free:
            return block
        raise KeyError("no block is free")

    def take(self, kind: Kind = Kind.TEXT) -> int:
        """Take the block at the head of the free queue, remove its names, and return it.

        Blocks without a name come first there, then the least recently released ones.
        kind: content that the block will have.

        Raises KeyError when no block is free.
        """
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
        """The block's name (None if it has none), and (name, rows) for each named run of its first rows."""
        parts = ((name, self._by_part[name][1]) for name in self._parts_of.get(block, ()))
        return self._hash_of[block], tuple(parts)

    def share(self, block: int) -> None:
        """Count one more block table that uses the block."""
        if self._refs[block] == 0:
            del self._free[block]
            self._idle -= self._hash_of[block] is not None
            self._used_visual += self._kinds[block] is Kind.VISUAL
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """Count one block table less. With the last one the block becomes free and keeps its names."""
        if self._refs[block] <= 0:
            raise RuntimeError(f"block {block} is released, but no block table holds it")
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
        """Give a full block its name.

        If another block already has the name, it keeps it: both hold the same KV.
        """
        if self._hash_of[block] is None and name not in self._by_hash:
            self._hash_of[block] = name
            self._by_hash[name] = block
            self._cached_visual += self._kinds[block] is Kind.VISUAL
            self._idle += self._refs[block] == 0

    def publish_part(self, block: int, name: bytes, rows: int) -> None:
        """Name the first `rows` rows of a block. They are computed and will not be written again."""
        if name not in self._by_part:
            self._by_part[name] = block, rows
            self._parts_of.setdefault(block, []).append(name)

    def find_part(self, name: bytes) -> tuple[int, int] | None:
        """The (block, rows) that has this name, to copy the rows from; None if there is none."""
        return self._by_part.get(name)

    def forget_all(self) -> int:
        """Remove all names; blocks in use stay with their sequences. Returns how many blocks had a name."""
        names = len(self._by_hash)
        self._hash_of = [None] * self.size
        self._by_hash.clear()
        self._cached_visual = self._idle = 0
        self._by_part.clear()
        self._parts_of.clear()
        return names

    def _forget(self, block: int) -> None:
        """Remove all names of a free block."""
        name = self._hash_of[block]
        if name is not None:
            del self._by_hash[name]
            self._hash_of[block] = None
            self._cached_visual -= self._kinds[block] is Kind.VISUAL
            self._idle -= 1
        for part in self._parts_of.pop(block, ()):
            del self._by_part[part]

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Raise RuntimeError unless reference counts, free queue and names agree with the block tables."""
        expected = [0] * self.size
        for table in tables:
            for block in table:
                expected[block] += 1
        if expected != self._refs:
            wrong = [b for b in range(self.size) if expected[b] != self._refs[b]]
            raise RuntimeError(f"blocks {wrong[:8]} have a wrong reference count: leaked or released twice")
        if {b for b in range(self.size) if self._refs[b] == 0} != set(self._free):
            raise RuntimeError("the free queue does not hold exactly the blocks that are not in use")
        visual = [b for b in range(self.size) if self._kinds[b] is Kind.VISUAL]
        used, cached = (
            sum(self._refs[b] > 0 for b in visual),
            sum(self._hash_of[b] is not None for b in visual),
        )
        if (used, cached) != (self._used_visual, self._cached_visual):
            raise RuntimeError("the counts of blocks with images are wrong")
        if self._idle != sum(self._hash_of[block] is not None for block in self._free):
            raise RuntimeError("the count of named blocks that are not in use is wrong")
        for name, block in self._by_hash.items():
            if self._hash_of[block] != name:
                raise RuntimeError(f"block {block} can be found by a name that it does not have")
        if {(part, block) for block, parts in self._parts_of.items() for part in parts} != {
            (part, block) for part, (block, _) in self._by_part.items()
        }:
            raise RuntimeError("the two indexes of named first rows do not agree")
