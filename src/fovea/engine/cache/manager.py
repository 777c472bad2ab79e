"""Block tables of sequences: what a prefix already has, what a step needs, what comes back.

Only full blocks are shared, and a full block is never written again, so sharing needs no copy-on-write: the tail that a
sequence writes is always its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from fovea.engine.cache.blocks import BlockPool
from fovea.engine.cache.hashing import block_hash, root_hash
from fovea.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """blocks: cached blocks from the start on. pending: id of a sequence that is computing the next one right now."""

    blocks: tuple[int, ...]
    pending: str | None = None


class KVManager:
    def __init__(self, pool: BlockPool, block_size: int, *, share_prefixes: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.share_prefixes = share_prefixes
        self.hit_tokens = 0
        self.query_tokens = 0
        self._tables: dict[str, Sequence] = {}
        self._pending: dict[bytes, str] = {}

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, seq: Sequence) -> PrefixMatch:
        """The longest cached prefix of `seq`, at most all but its last token: one must be computed to go on."""
        if not self.share_prefixes:
            return PrefixMatch(())
        self._name_blocks(seq, (seq.length - 1) // self.block_size)
        found: list[int] = []
        for name in seq.block_hashes[: (seq.length - 1) // self.block_size]:
            block = self.pool.find(name)
            if block is None:
                return PrefixMatch(tuple(found), self._pending.get(name))
            found.append(block)
        return PrefixMatch(tuple(found))

    def can_admit(self, match: PrefixMatch, tokens: int) -> bool:
        """Whether the match can be locked and blocks for `tokens` in all be found beside it.

        What admitted sequences still need for their own tokens is spoken for.
        """
        locked = sum(1 for block in match.blocks if self.pool.is_free(block))
        promised = sum(max(0, self.blocks_for(seq.length) - len(seq.blocks)) for seq in self._tables.values())
        return self.blocks_for(tokens) - len(match.blocks) <= self.pool.free - locked - promised

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        """Lock the match as the start of the sequence's table."""
        for block in match.blocks:
            self.pool.share(block)
        seq.blocks = list(match.blocks)
        seq.computed = len(match.blocks) * self.block_size
        self._tables[seq.id] = seq
        if not seq.preemptions:
            # What it finds again after a preemption it has computed itself.
            seq.cached_tokens = min(seq.computed, len(seq.prompt_ids))
            self.hit_tokens += seq.computed
            self.query_tokens += seq.length
        for name in seq.block_hashes[len(match.blocks) :]:
            self._pending.setdefault(name, seq.id)

    def can_extend(self, seq: Sequence, tokens: int) -> bool:
        return self.blocks_for(tokens) - len(seq.blocks) <= self.pool.free

    def extend(self, seq: Sequence, tokens: int) -> None:
        """Blocks for the first `tokens` tokens of `seq`. Raises KeyError when the pool is empty."""
        while len(seq.blocks) < self.blocks_for(tokens):
            seq.blocks.append(self.pool.take())

    def commit(self, seq: Sequence, count: int) -> None:
        """`count` more tokens are computed; blocks that became full get their names."""
        before = seq.computed // self.block_size
        seq.computed += count
        after = seq.computed // self.block_size
        if not self.share_prefixes or after == before:
            return
        self._name_blocks(seq, after)
        for index in range(before, after):
            name = seq.block_hashes[index]
            self.pool.publish(seq.blocks[index], name)
            if self._pending.get(name) == seq.id:
                del self._pending[name]

    def release(self, seq: Sequence) -> None:
        """Give everything back; what is named stays findable. Later blocks go first: a leaf is worth least."""
        for block in reversed(seq.blocks):
            self.pool.release(block)
        for name in seq.block_hashes:
            if self._pending.get(name) == seq.id:
                del self._pending[name]
        seq.blocks = []
        seq.computed = 0
        self._tables.pop(seq.id, None)

    def check_integrity(self) -> None:
        self.pool.check_integrity([seq.blocks for seq in self._tables.values()])
        stale = set(self._pending.values()) - set(self._tables)
        if stale:
            raise RuntimeError(f"prefixes are promised by sequences that are gone: {sorted(stale)[:4]}")

    def _name_blocks(self, seq: Sequence, count: int) -> None:
        size = self.block_size
        while len(seq.block_hashes) < count:
            start = len(seq.block_hashes) * size
            parent = seq.block_hashes[-1] if seq.block_hashes else root_hash(seq.salt)
            spans = seq.spans_between(start, start + size)
            seq.block_hashes.append(block_hash(parent, seq.tokens(start, start + size), start, spans))
