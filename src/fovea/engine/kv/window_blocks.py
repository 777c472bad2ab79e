"""Blocks of layers with a sliding window: they return to their pool when no later token sees them.

Layers with a window have a pool of their own. A sequence's table has an entry for every block of its tokens,
like the table of the layers that see all tokens. But entries of blocks behind the window are GONE.

A cached prefix can be reused if two things are cached: its blocks of all other layers, and the window blocks
that the next token sees.
"""

from __future__ import annotations

from collections.abc import Iterable

from fovea.engine.kv.blocks import BlockPool, Kind
from fovea.engine.sequence import Sequence

GONE = -1
"""Entry of a block table whose block was released, because no later token sees it."""


class WindowBlocks:
    """The window tables of all admitted sequences, and the prefixes that they share. Not thread-safe.

    pool: the blocks.
    window: tokens that a token sees, itself included.
    returned: blocks that sequences gave back because they lay behind the window.
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
