"""Block tables of sequences: what a prefix already has, what a step needs, what comes back.

Only full blocks are shared, and a full block is never written again: the tail that a sequence writes is always its own.
Where an image ends inside a block, the rows up to its end have a name of their own, and a follower with another question
copies them: an image is computed once to its last token.

Blocks of image prefixes that the pool gives up are saved to host memory, where there is room for them, and loaded when
they are asked for again. What a step has to copy, save and load is a list of moves, in an order that is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fovea.engine.kv.blocks import BlockPool, Kind
from fovea.engine.kv.hashing import block_hash, root_hash
from fovea.engine.kv.host_blocks import HostBlocks
from fovea.engine.kv.moves import Move
from fovea.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """blocks: cached blocks from the start on. slots: of host memory, with the blocks after those.

    pending: id of a sequence that is computing or loading the next one right now.
    part: (how, block or slot, rows) whose first rows are the next ones of the sequence.
    """

    blocks: tuple[int, ...]
    pending: str | None = None
    part: tuple[Literal["copy", "load"], int, int] | None = None
    slots: tuple[int, ...] = ()


class KVManager:
    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        share_prefixes: bool = True,
        host: HostBlocks | None = None,
        ttl_s: int = 0,
    ) -> None:
        """ttl_s: how long a generation of prefixes lasts; 0: for ever."""
        self.pool = pool
        self.host = HostBlocks(0) if host is None else host
        self.block_size = block_size
        self.share_prefixes = share_prefixes
        self.hit_tokens = 0
        self.query_tokens = 0
        self._ttl_s = ttl_s
        self._tables: dict[str, Sequence] = {}
        self._pending: dict[bytes, str] = {}
        self._promises: dict[str, set[bytes]] = {}
        self._moves: list[Move] = []
        self._loading: list[tuple[Sequence, int, bytes, int]] = []

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, seq: Sequence) -> PrefixMatch:
        """The longest cached prefix of `seq`, at most all but its last token: one must be computed to go on."""
        if not self.share_prefixes:
            return PrefixMatch(())
        self._name_blocks(seq, (seq.length - 1) // self.block_size)
        blocks: list[int] = []
        slots: list[int] = []
        for name in seq.block_hashes[: (seq.length - 1) // self.block_size]:
            block = None if slots else self.pool.find(name)
            if block is not None:
                blocks.append(block)
                continue
            if name in self._pending:
                return PrefixMatch(tuple(blocks), self._pending[name], slots=tuple(slots))
            slot = self.host.find(name)
            if slot is None:
                break
            slots.append(slot)
        return self._with_part(seq, tuple(blocks), tuple(slots))

    def _with_part(self, seq: Sequence, blocks: tuple[int, ...], slots: tuple[int, ...]) -> PrefixMatch:
        """What was found, and the longest part of the next block that is named, or is going to be."""
        for _, name in reversed(self._part_names(seq, len(blocks) + len(slots), seq.length - 1)):
            cached, saved = self.pool.find_part(name), self.host.find_part(name)
            if cached:
                return PrefixMatch(blocks, None, ("copy", *cached), slots)
            if name in self._pending:
                return PrefixMatch(blocks, self._pending[name], None, slots)
            if saved:
                return PrefixMatch(blocks, None, ("load", *saved), slots)
        return PrefixMatch(blocks, slots=slots)

    def _part_names(self, seq: Sequence, index: int, limit: int) -> list[tuple[int, bytes]]:
        """(rows, name) for each image that ends inside block `index`, up to position `limit`."""
        start, names = index * self.block_size, []
        for span in seq.spans:
            if start < span.end < start + self.block_size and span.end <= limit:
                parent = seq.block_hashes[index - 1] if index else self._root(seq)
                touched = seq.spans_between(start, span.end)
                names.append(
                    (span.end - start, block_hash(parent, seq.tokens(start, span.end), start, touched))
                )
        return names

    def matched(self, match: PrefixMatch) -> int:
        """Tokens that a sequence has computed once it is admitted with the match."""
        whole = len(match.blocks) + len(match.slots)
        return whole * self.block_size + (match.part[2] if match.part else 0)

    def can_admit(self, match: PrefixMatch, tokens: int) -> bool:
        """Whether the match can be locked and blocks for `tokens` in all be found beside it.

        What admitted sequences still need for their own tokens is spoken for.
        """
        locked = sum(1 for block in match.blocks if self.pool.is_free(block))
        promised = sum(max(0, self.blocks_for(seq.length) - len(seq.blocks)) for seq in self._tables.values())
        return self.blocks_for(tokens) - len(match.blocks) <= self.pool.free - locked - promised

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        """Lock the match as the start of the sequence's table; what has to be copied and loaded becomes moves."""
        for block in match.blocks:
            self.pool.share(block)
        seq.blocks = list(match.blocks)
        seq.computed = self.matched(match)
        self._tables[seq.id] = seq
        self._fetch(seq, match)
        if not seq.preemptions:
            # What it finds again after a preemption it has computed itself.
            seq.cached_tokens = min(seq.computed, len(seq.prompt_ids))
            self.hit_tokens += seq.computed
            self.query_tokens += seq.length
        names = seq.block_hashes[len(match.blocks) :]
        if self.share_prefixes:
            names = [*names, *self._parts_to_come(seq)]
        for name in names:
            if self._pending.setdefault(name, seq.id) == seq.id:
                self._promises.setdefault(seq.id, set()).add(name)

    def _fetch(self, seq: Sequence, match: PrefixMatch) -> None:
        """Blocks for what is not in place. The part first: taking blocks for the others may cost its source its name."""
        whole = len(match.blocks) + len(match.slots)
        part = match.part
        self.host.lock({*match.slots, *([part[1]] if part and part[0] == "load" else [])})
        last: list[int] = []
        if part is not None:
            how, source, rows = part
            # The source may be the very block that is taken: then its rows are where they belong.
            last.append(self._take(seq, whole))
            self._moves.append(Move(how, source, last[0], rows, seq.id))
            if how == "load":
                names = dict(self._part_names(seq, whole, seq.length))
                self._loading.append((seq, last[0], names[rows], rows))
        for slot in match.slots:
            index = len(seq.blocks)
            seq.blocks.append(self._take(seq, index))
            self._moves.append(Move("load", slot, seq.blocks[-1], self.block_size, seq.id))
            self._loading.append((seq, seq.blocks[-1], seq.block_hashes[index], self.block_size))
        seq.blocks += last
        self.host.unlock()
        self.host.loads += sum(move.kind == "load" and move.owner == seq.id for move in self._moves)

    def _take(self, seq: Sequence, index: int) -> int:
        """A block for place `index` of the sequence's table. What it held of an image's prefix is saved."""
        block = self.pool.next()
        if self.pool.kind(block) is not Kind.TEXT:
            slot = self.host.put(*self.pool.names(block))
            if slot is not None:
                self._moves.append(Move("save", block, slot, self.block_size))
        start = index * self.block_size
        if seq.spans_between(start, start + self.block_size):
            return self.pool.take(Kind.VISUAL)
        return self.pool.take(Kind.LEAD if seq.spans and start < seq.spans[-1].start else Kind.TEXT)

    def take_moves(self) -> tuple[Move, ...]:
        """Those of the step that is being planned, to be made in this order before anything is computed."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def moved(self) -> None:
        """The step's moves are made: what was loaded has its names again."""
        for seq, block, name, rows in self._loading:
            if rows == self.block_size:
                self.pool.publish(block, name)
            else:
                self.pool.publish_part(block, name, rows)
            self._keep_promise(seq, name)
        self._loading = []

    def lost_moves(self) -> None:
        """Nobody knows which of the step's moves were made, so what host memory holds is not to be trusted."""
        self._loading = []
        self.host.forget_all()

    def forget_all(self) -> None:
        """Drop every name; used blocks stay with their sequences."""
        self.pool.forget_all()
        self.host.forget_all()

    def _parts_to_come(self, seq: Sequence) -> list[bytes]:
        ends = {span.end // self.block_size for span in seq.spans if span.end > seq.computed}
        known = [index for index in ends if index <= len(seq.block_hashes)]
        return [name for index in known for _, name in self._part_names(seq, index, seq.length)]

    def can_extend(self, seq: Sequence, tokens: int) -> bool:
        return self.blocks_for(tokens) - len(seq.blocks) <= self.pool.free

    def extend(self, seq: Sequence, tokens: int) -> None:
        """Blocks for the first `tokens` tokens of `seq`. Raises KeyError when the pool is empty."""
        while len(seq.blocks) < self.blocks_for(tokens):
            seq.blocks.append(self._take(seq, len(seq.blocks)))

    def commit(self, seq: Sequence, count: int) -> None:
        """`count` more tokens are computed; blocks that became full get their names."""
        first, before = seq.computed, seq.computed // self.block_size
        seq.computed += count
        after = seq.computed // self.block_size
        if not self.share_prefixes:
            return
        self._name_blocks(seq, after)
        for span in seq.spans:
            if first < span.end <= seq.computed and span.end % self.block_size:
                index = span.end // self.block_size
                for rows, name in self._part_names(seq, index, span.end):
                    self.pool.publish_part(seq.blocks[index], name, rows)
                    self._keep_promise(seq, name)
        for index in range(before, after):
            name = seq.block_hashes[index]
            self.pool.publish(seq.blocks[index], name)
            self._keep_promise(seq, name)

    def _keep_promise(self, seq: Sequence, name: bytes) -> None:
        if self._pending.get(name) == seq.id:
            del self._pending[name]
            self._promises[seq.id].discard(name)

    def release(self, seq: Sequence) -> None:
        """Give everything back; what is named stays findable. Later blocks go first: a leaf is worth least."""
        for block in reversed(seq.blocks):
            self.pool.release(block)
        for name in self._promises.pop(seq.id, ()):
            del self._pending[name]
        seq.blocks = []
        seq.computed = 0
        self._tables.pop(seq.id, None)

    def check_integrity(self) -> None:
        self.host.check_integrity()
        self.pool.check_integrity([seq.blocks for seq in self._tables.values()])
        stale = set(self._pending.values()) - set(self._tables)
        if stale:
            raise RuntimeError(f"prefixes are promised by sequences that are gone: {sorted(stale)[:4]}")
        promised = {(name, owner) for owner, names in self._promises.items() for name in names}
        if promised != set(self._pending.items()):
            raise RuntimeError("promises and pending prefixes do not agree")

    def _root(self, seq: Sequence) -> bytes:
        return root_hash(seq.salt, int(seq.arrival // self._ttl_s) if self._ttl_s else 0)

    def _name_blocks(self, seq: Sequence, count: int) -> None:
        size = self.block_size
        while len(seq.block_hashes) < count:
            start = len(seq.block_hashes) * size
            parent = seq.block_hashes[-1] if seq.block_hashes else self._root(seq)
            spans = seq.spans_between(start, start + size)
            seq.block_hashes.append(block_hash(parent, seq.tokens(start, start + size), start, spans))
