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

Layers with a sliding window have a pool of their own (`WindowBlocks`). Blocks of image prefixes that a pool
evicts may be saved to slots of host memory (`HostBlocks`). This module holds integers only; the runner owns
the tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from fovea.engine.sequence import Sequence


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
    on_loss: called with the name of each block that loses it, for whatever reason.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.evictions = 0
        self.on_loss: Callable[[bytes], None] | None = None
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

    def is_shared(self, block: int) -> bool:
        """Whether several block tables use the block."""
        return self._refs[block] > 1

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
        names = list(self._by_hash)
        self._hash_of = [None] * self.size
        self._by_hash.clear()
        self._cached_visual = self._idle = 0
        self._by_part.clear()
        self._parts_of.clear()
        if self.on_loss is not None:
            for name in names:
                self.on_loss(name)
        return len(names)

    def _forget(self, block: int) -> None:
        """Remove all names of a free block."""
        name = self._hash_of[block]
        if name is not None:
            del self._by_hash[name]
            self._hash_of[block] = None
            self._cached_visual -= self._kinds[block] is Kind.VISUAL
            self._idle -= 1
            if self.on_loss is not None:
                self.on_loss(name)
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


GONE = -1
"""Entry of a block table whose block was released, because no later token sees it."""


class WindowBlocks:
    """The window tables of all admitted sequences, and the prefixes that they share. Not thread-safe.

    Layers with a window have a pool of their own. A sequence's table has an entry for every block of its
    tokens, like the table of the layers that see all tokens. But the entry of a block that the window has
    left is GONE.

    A cached prefix can be reused if two things are cached: its blocks of all other layers, and the window
    blocks that the next token sees.

    pool: the blocks.
    window: tokens that a token sees, itself included.
    returned: blocks that sequences gave back because the window had left them.
    """

    def __init__(self, pool: BlockPool, block_size: int, window: int, most_new: int) -> None:
        """most_new: most tokens of a sequence that a step computes. The others are as above."""
        self.pool = pool
        self._size = block_size
        self.window = window
        self.returned = 0
        self._most_new = most_new

    def first_visible(self, position: int) -> int:
        """Number of the first block that the token at `position` sees."""
        return max(0, position - self.window + 1) // self._size

    def blocks_at_once(self, tokens: int, left: int) -> int:
        """The most blocks that a sequence of `tokens` tokens uses from now on. left: tokens to compute."""
        visible = self.window + min(left, self._most_new) + self._size
        return -(-min(tokens, visible) // self._size)

    def usable(self, names: list[bytes], count: int) -> int:
        """The longest prefix of at most `count` whole blocks whose window is cached, in blocks.

        names: names of the prefix's blocks.
        """
        run, best = 0, 0  # run: cached blocks next to each other, up to the current one
        for index in range(count):
            run = 0 if self.pool.find(names[index]) is None else run + 1
            end = index + 1
            if run >= end - self.first_visible(end * self._size):
                best = end
        return best

    def missing(self, seq: Sequence, tokens: int) -> int:
        """How many blocks a sequence lacks for its first `tokens` tokens."""
        return -(-tokens // self._size) - len(seq.window_blocks)

    def has_room(self, tokens: int, shared: Iterable[int], others: Iterable[Sequence]) -> bool:
        """Whether a sequence of `tokens` tokens can be admitted.

        shared: cached blocks that it begins with. others: the sequences that are admitted.
        """
        shared = list(shared)
        locked = sum(self.pool.is_free(block) for block in shared)
        needed = sum(max(0, self._most_needed(seq)) for seq in others)
        return self.blocks_at_once(tokens, tokens) - len(shared) <= self.pool.free - locked - needed

    def _most_needed(self, seq: Sequence) -> int:
        """The most blocks that a sequence will need for its tokens, beside those that it has."""
        have = sum(block != GONE for block in seq.window_blocks)
        return self.blocks_at_once(seq.length, seq.length - seq.computed_tokens) - have

    def shared(self, names: list[bytes], count: int, position: int) -> list[int]:
        """The cached blocks that the token at `position` sees, of a prefix of `count` whole blocks."""
        found = [self.pool.find(name) for name in names[self.first_visible(position) : count]]
        return [block for block in found if block is not None]

    def admit(self, seq: Sequence, count: int, position: int) -> None:
        """Begin a sequence's table with a cached prefix of `count` whole blocks.

        position: the first token that the sequence will compute.
        """
        blocks = self.shared(seq.block_hashes, count, position)
        for block in blocks:
            self.pool.share(block)
        seq.window_blocks = [GONE] * (count - len(blocks)) + blocks

    def extend(self, seq: Sequence, tokens: int) -> None:
        """Take blocks until there is room for the first `tokens` tokens. Raises KeyError if none is free."""
        while self.missing(seq, tokens) > 0:
            start = len(seq.window_blocks) * self._size
            visual = bool(seq.spans_between(start, start + self._size))
            seq.window_blocks.append(self.pool.take(Kind.VISUAL if visual else Kind.TEXT))

    def publish(self, seq: Sequence, index: int, name: bytes, rows: int = 0) -> None:
        """Name block `index` of a sequence, or its first `rows` rows. Does nothing if the block is gone."""
        block = seq.window_blocks[index]
        if block == GONE:
            return
        if rows:
            self.pool.publish_part(block, name, rows)
        else:
            self.pool.publish(block, name)

    def release_behind(self, seq: Sequence) -> None:
        """Release the blocks that no later token sees. They keep their names as long as they are free."""
        last = min(self.first_visible(seq.computed_tokens), len(seq.window_blocks))
        for index in range(last - 1, -1, -1):
            if seq.window_blocks[index] == GONE:
                break
            self.pool.release(seq.window_blocks[index])
            seq.window_blocks[index] = GONE
            self.returned += 1

    def release(self, seq: Sequence) -> None:
        for block in reversed(seq.window_blocks):
            if block != GONE:
                self.pool.release(block)
        seq.window_blocks = []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless the pool agrees with the tables."""
        tables = [[block for block in seq.window_blocks if block != GONE] for seq in sequences]
        self.pool.check_integrity(tables)


Part = tuple[bytes, int]
"""The name of a block's first rows, and the number of those rows."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes | None
    parts: tuple[Part, ...]


class HostBlocks:
    """The account of host memory slots: at most `slots` blocks; the least recently used is evicted first.

    Device memory is small and expensive, and a follow-up question reuses the KV of an image. Blocks of
    text alone are not saved: computing them again takes about as long as a copy.

    Locked slots are not evicted.
    size: number of slots.
    loads: blocks loaded back to the pool so far.
    evictions: slots reused for another block so far.
    on_loss: called with the name of each full block that is here no longer.
    """

    def __init__(self, slots: int) -> None:
        self.on_loss: Callable[[bytes], None] | None = None
        self.size = slots
        self.loads = 0
        self.evictions = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._by_name: dict[bytes, int] = {}
        self._by_part: dict[bytes, tuple[int, int]] = {}
        self._blank = list(range(slots))
        self._locked: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, name: bytes | None, parts: tuple[Part, ...]) -> int | None:
        """Reserve a slot for a block with these names; the caller copies the KV.

        Returns None if all names are known already, or if every slot is locked.
        """
        parts = tuple(part for part in parts if part[0] not in self._by_part)
        if name in self._by_name:
            self._entries.move_to_end(self._by_name[name])
            name = None
        if name is None and not parts:
            return None
        slot = self._room()
        if slot is None:
            return None
        self._entries[slot] = _Entry(name, parts)
        if name is not None:
            self._by_name[name] = slot
        self._by_part.update({part: (slot, rows) for part, rows in parts})
        return slot

    def find(self, name: bytes) -> int | None:
        return self._by_name.get(name)

    def find_part(self, name: bytes) -> tuple[int, int] | None:
        """The (slot, rows) that has this name; None if there is none."""
        return self._by_part.get(name)

    def lock(self, slots: set[int]) -> None:
        """Until `unlock`, do not evict these slots, which are about to be loaded; mark them as used now."""
        self._locked = slots
        for slot in slots:
            self._entries.move_to_end(slot)

    def unlock(self) -> None:
        self._locked = set()

    def forget_all(self) -> None:
        names = list(self._by_name)
        self._entries.clear()
        self._by_name.clear()
        self._by_part.clear()
        self._blank = list(range(self.size))
        if self.on_loss is not None:
            for name in names:
                self.on_loss(name)

    def _room(self) -> int | None:
        if self._blank:
            return self._blank.pop()
        slot = next((slot for slot in self._entries if slot not in self._locked), None)
        if slot is None:
            return None
        entry = self._entries.pop(slot)
        if entry.name is not None:
            del self._by_name[entry.name]
            if self.on_loss is not None:
                self.on_loss(entry.name)
        for name, _ in entry.parts:
            del self._by_part[name]
        self.evictions += 1
        return slot

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every slot is either blank or has one entry, and all names match."""
        if sorted([*self._blank, *self._entries]) != list(range(self.size)):
            raise RuntimeError("a host slot is missing or counted twice")
        names = {entry.name: slot for slot, entry in self._entries.items() if entry.name is not None}
        parts = {part: (slot, rows) for slot, entry in self._entries.items() for part, rows in entry.parts}
        if names != self._by_name or parts != self._by_part:
            raise RuntimeError("the names of host slots do not agree with their entries")
