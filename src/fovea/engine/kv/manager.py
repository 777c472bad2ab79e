"""Block tables of sequences: which blocks of a prefix are cached, which a step needs, and which are released.

Only full blocks are shared, and a full block is never written again: the last block, which a sequence still
writes, is always its own. Where an image ends inside a block, the rows up to the end of the image have a name
of their own. A later sequence with another question copies these rows, so an image is computed once, up to
its last token.

Blocks of image prefixes that the pool evicts are saved to host memory if a slot is available there, and
loaded when a sequence needs them again. The copies, saves and loads of a step are a list of moves. Their
order matters: the runner carries them out one after the other.
"""

from __future__ import annotations

from fovea.engine.kv.blocks import BlockPool, Kind
from fovea.engine.kv.hashing import block_hash, root_hash
from fovea.engine.kv.host_blocks import HostBlocks
from fovea.engine.kv.match import PrefixMatch
from fovea.engine.kv.moves import Move
from fovea.engine.sequence import Sequence


class KVManager:
    """The block tables of all admitted sequences, and the prefixes that sequences share; not thread-safe.

    Two counters grow with every admission that does not follow a preemption:
    query_tokens: tokens of the admitted sequences.
    hit_tokens: how many of these tokens had their KV in a cache.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        share_prefixes: bool = True,
        host: HostBlocks | None = None,
        ttl_s: int = 0,
    ) -> None:
        """Create a manager without sequences.

        pool: the KV blocks.
        block_size: tokens per block.
        share_prefixes: reuse the KV of other sequences.
        host: slots of host memory for evicted blocks; None for no slots.
        ttl_s: length of a generation of prefixes in seconds; 0 for no limit. A sequence can reuse only
            prefixes of its own generation, which is its arrival time divided by `ttl_s`, rounded down.
        """
        self.pool = pool
        self.host = HostBlocks(0) if host is None else host
        self.block_size = block_size
        self.share_prefixes = share_prefixes
        self.hit_tokens = 0
        self.query_tokens = 0
        self._ttl_s = ttl_s
        self._sequences: dict[str, Sequence] = {}
        self._pending: dict[bytes, str] = {}
        self._expected: dict[str, set[bytes]] = {}
        self._moves: list[Move] = []
        self._loading: list[tuple[Sequence, int, bytes, int]] = []

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, seq: Sequence) -> PrefixMatch:
        """The longest cached prefix of `seq` without its last token, which must be computed to get logits."""
        if not self.share_prefixes or seq.scores_prompt:
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
        """Complete a match by the longest part of the next block that has a name or is being computed now."""
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
        for span in seq.spans_between(start, start + self.block_size):
            if span.end < start + self.block_size and span.end <= limit:
                parent = seq.block_hashes[index - 1] if index else self._root(seq)
                touched = seq.spans_between(start, span.end)
                names.append(
                    (span.end - start, block_hash(parent, seq.tokens(start, span.end), start, touched))
                )
        return names

    def matched_tokens(self, match: PrefixMatch) -> int:
        """The number of tokens that count as computed when a sequence is admitted with this match."""
        whole = len(match.blocks) + len(match.slots)
        return whole * self.block_size + (match.part[2] if match.part else 0)

    def can_admit(self, match: PrefixMatch, tokens: int) -> bool:
        """Whether a sequence of `tokens` tokens in all can be admitted with this match.

        Three things must fit into the free blocks: the free blocks of the match, the blocks that the sequence
        needs in addition, and the blocks that admitted sequences still need for the tokens they have now.
        """
        locked = sum(1 for block in match.blocks if self.pool.is_free(block))
        needed = sum(
            max(0, self.blocks_for(seq.length) - len(seq.blocks)) for seq in self._sequences.values()
        )
        return self.blocks_for(tokens) - len(match.blocks) <= self.pool.free - locked - needed

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        """Start the sequence's block table with the match, and plan the moves that the match needs.

        Other sequences with the same prefix wait for the blocks that this one is going to compute or load.
        """
        for block in match.blocks:
            self.pool.share(block)
        seq.blocks = list(match.blocks)
        seq.computed_tokens = self.matched_tokens(match)
        self._sequences[seq.id] = seq
        self._fetch(seq, match)
        if not seq.preemptions:
            # After a preemption the sequence finds blocks that it computed itself: they do not count as cache
            # hits.
            seq.cached_tokens = min(seq.computed_tokens, len(seq.prompt_ids))
            self.hit_tokens += seq.computed_tokens
            self.query_tokens += seq.length
        names = seq.block_hashes[len(match.blocks) :]
        if self.share_prefixes:
            names = [*names, *self._future_part_names(seq)]
        for name in names:
            if self._pending.setdefault(name, seq.id) == seq.id:
                self._expected.setdefault(seq.id, set()).add(name)

    def _fetch(self, seq: Sequence, match: PrefixMatch) -> None:
        """Take blocks for the part and for the host slots of the match, and plan the moves that fill them.

        The part's block is taken first, because taking a block for a slot may evict the source of the part.
        """
        whole = len(match.blocks) + len(match.slots)
        part = match.part
        self.host.lock({*match.slots, *([part[1]] if part and part[0] == "load" else [])})
        last: list[int] = []
        if part is not None:
            how, source, rows = part
            # The block that is taken may be the source itself: then its rows are in place already.
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
        """Take a block for entry `index` of the sequence's block table.

        If the block held a part of an image prefix, plan a move that saves it to host memory.
        """
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
        """Return and clear the moves of the step that is being planned.

        They must be carried out in this order, before the step computes anything.
        """
        moves, self._moves = tuple(self._moves), []
        return moves

    def finish_moves(self) -> None:
        """The step's moves were carried out: give the loaded blocks their names."""
        for seq, block, name, rows in self._loading:
            if rows == self.block_size:
                self.pool.publish(block, name)
            else:
                self.pool.publish_part(block, name, rows)
            self._mark_available(seq, name)
        self._loading = []

    def abandon_moves(self) -> None:
        """The step failed: which moves were carried out is unknown, so forget everything in host memory."""
        self._loading = []
        self.host.forget_all()

    def forget_all(self) -> None:
        """Remove all names, in the pool and in host memory; blocks in use stay with their sequences."""
        self.pool.forget_all()
        self.host.forget_all()

    def _future_part_names(self, seq: Sequence) -> list[bytes]:
        ends = {span.end // self.block_size for span in seq.spans if span.end > seq.computed_tokens}
        named = [index for index in ends if index <= len(seq.block_hashes)]
        return [name for index in named for _, name in self._part_names(seq, index, seq.length)]

    def can_extend(self, seq: Sequence, tokens: int) -> bool:
        return self.blocks_for(tokens) - len(seq.blocks) <= self.pool.free

    def extend(self, seq: Sequence, tokens: int) -> None:
        """Take blocks until `seq` has room for its first `tokens` tokens.

        Raises KeyError when no block is free.
        """
        while len(seq.blocks) < self.blocks_for(tokens):
            seq.blocks.append(self._take(seq, len(seq.blocks)))

    def commit(self, seq: Sequence, count: int) -> None:
        """Count `count` more tokens as computed, and name the blocks and parts that became complete."""
        first, before = seq.computed_tokens, seq.computed_tokens // self.block_size
        seq.computed_tokens += count
        after = seq.computed_tokens // self.block_size
        if not self.share_prefixes:
            return
        self._name_blocks(seq, after)
        for span in seq.spans_between(first, seq.computed_tokens):
            if span.end <= seq.computed_tokens and span.end % self.block_size:
                index = span.end // self.block_size
                for rows, name in self._part_names(seq, index, span.end):
                    self.pool.publish_part(seq.blocks[index], name, rows)
                    self._mark_available(seq, name)
        for index in range(before, after):
            name = seq.block_hashes[index]
            self.pool.publish(seq.blocks[index], name)
            self._mark_available(seq, name)

    def _mark_available(self, seq: Sequence, name: bytes) -> None:
        if self._pending.get(name) == seq.id:
            del self._pending[name]
            self._expected[seq.id].discard(name)

    def release(self, seq: Sequence) -> None:
        """Release all blocks of the sequence; named blocks can still be found by later sequences.

        The last block is released first and so evicted first, because without the earlier blocks it cannot be
        reused.
        """
        for block in reversed(seq.blocks):
            self.pool.release(block)
        for name in self._expected.pop(seq.id, ()):
            del self._pending[name]
        seq.blocks = []
        seq.computed_tokens = 0
        self._sequences.pop(seq.id, None)

    def check_integrity(self) -> None:
        self.host.check_integrity()
        self.pool.check_integrity([seq.blocks for seq in self._sequences.values()])
        stale = set(self._pending.values()) - set(self._sequences)
        if stale:
            raise RuntimeError(f"prefixes are expected from sequences that have ended: {sorted(stale)[:4]}")
        expected = {(name, owner) for owner, names in self._expected.items() for name in names}
        if expected != set(self._pending.items()):
            raise RuntimeError("the names expected from each sequence and the pending prefixes do not agree")

    def _root(self, seq: Sequence) -> bytes:
        return root_hash(seq.salt, int(seq.arrival // self._ttl_s) if self._ttl_s else 0)

    def _name_blocks(self, seq: Sequence, count: int) -> None:
        size = self.block_size
        while len(seq.block_hashes) < count:
            start = len(seq.block_hashes) * size
            parent = seq.block_hashes[-1] if seq.block_hashes else self._root(seq)
            spans = seq.spans_between(start, start + size)
            seq.block_hashes.append(block_hash(parent, seq.tokens(start, start + size), start, spans))
