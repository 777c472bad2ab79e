"""Block tables of sequences: which blocks of a prefix are cached, which a step needs, and which are released.

Only full blocks are shared, and a block that others may read is never written again: the last block, which a
sequence still writes, is always its own. Where an image ends inside a block, the rows up to the end of the
image have a name of their own. A later sequence with another question copies these rows, so an image is
computed once, up to its last token.

Blocks of image prefixes that the pool evicts are saved to host memory if a slot is available there, and
loaded when a sequence needs them again. The copies, saves and loads of a step are a list of moves. Their
order matters: the runner carries them out one after the other.

For models with layers that keep a state, a prefix can be reused only up to a place where a state was saved
(`states`). A hit needs both blocks and state. Layers with a sliding window have blocks of their own; a
sequence holds only those that it still sees (`WindowBlocks`).

A sequence may keep only a part of its tokens (`keep`). Then its blocks hold the kept rows only, and their
names include the rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fovea.engine.changes import DEVICE, HOST, BlockChanges
from fovea.engine.keep import NEVER, NOTHING_DROPPED, WINDOW, Kept, kept_at, next_point, room
from fovea.engine.kv.announce import Announcer
from fovea.engine.kv.blocks import BlockPool, HostBlocks, Kind, WindowBlocks
from fovea.engine.kv.hashing import PrefixNames
from fovea.engine.kv.states import Checkpoints, StateSlots
from fovea.engine.sequence import Sequence, StateWork

Part = tuple[Literal["copy", "load"], int, int]
"""The source of the first rows of a block, see `PrefixMatch.part`."""


class KVManager:
    """The block tables of all admitted sequences, and the prefixes that sequences share; not thread-safe.

    Two counters grow with every admission that does not follow a preemption:
    query_tokens: tokens of the admitted sequences.
    hit_tokens: how many of these tokens had their KV in a cache.

    dropped_tokens: tokens that sequences have left out since the start.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        share_prefixes: bool = True,
        host: HostBlocks | None = None,
        ttl_s: int = 0,
        states: StateSlots | None = None,
        window: WindowBlocks | None = None,
        whole_images: bool = False,
        changes: BlockChanges | None = None,
    ) -> None:
        """Create a manager without sequences.

        pool: the KV blocks.
        block_size: tokens per block.
        share_prefixes: reuse the KV of other sequences.
        host: slots of host memory for evicted blocks; None for no slots.
        ttl_s: length of a generation of prefixes in seconds; 0 for no limit. A sequence can reuse only
            prefixes of its own generation, which is its arrival time divided by `ttl_s`, rounded down.
        states: slots for the states of sequences; None: the model has no layers with a state.
        window: blocks of layers with a sliding window; None: the model has no such layers.
        whole_images: the tokens of an image see each other, so no prefix ends inside an image.
        changes: gets every change of the cached blocks; None: nobody wants to know.
        """
        self.pool = pool
        self.host = HostBlocks(0) if host is None else host
        self.block_size = block_size
        self.share_prefixes = share_prefixes
        self.hit_tokens = 0
        self.query_tokens = 0
        self.dropped_tokens = 0
        self.names = PrefixNames(block_size, ttl_s)
        self.states = None if states is None else Checkpoints(states, self.names, pool, share=share_prefixes)
        self.window = window
        self.whole_images = whole_images
        self._announcer = None if changes is None else Announcer(changes, pool, self.host, block_size)
        self._sequences: dict[str, Sequence] = {}
        self._pending: dict[bytes, str] = {}
        self._expected: dict[str, set[bytes]] = {}
        self._moves: list[Move | Compaction] = []
        self._compacted: list[tuple[Sequence, list[int]]] = []
        self._loading: list[tuple[Sequence, int, bytes, int]] = []

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def rows_of(self, seq: Sequence) -> int:
        """The rows that a sequence needs until all tokens that it has now are computed."""
        rows = seq.length - seq.dropped
        return rows if seq.keep is None or seq.keep.share else min(rows, seq.keep.bound(self.block_size))

    def match(self, seq: Sequence) -> PrefixMatch:
        """The longest cached prefix of `seq` without its last token, which must be computed to get logits.

        If the sequence keeps only a part of its tokens, the match ends before the tokens that decide.
        """
        if not self.share_prefixes or seq.scores_prompt:
            return PrefixMatch(())
        if seq.keep is not None and not seq.keep.share and (kept := self._match_kept(seq)) is not None:
            return kept
        blocks: list[int] = []
        slots: list[int] = []
        limit = self._limit(seq, NOTHING_DROPPED)
        self.names.fill(seq, limit // self.block_size)
        for name in seq.block_hashes[: limit // self.block_size]:
            block = None if slots else self.pool.find(name)
            if block is not None:
                blocks.append(block)
                continue
            if self.states is None and name in self._pending:
                return PrefixMatch(tuple(blocks), self._pending[name], slots=tuple(slots))
            slot = self.host.find(name)
            if slot is None:
                break
            slots.append(slot)
        if self.states is not None:
            return self._with_state(self.states, seq, tuple(blocks), tuple(slots))
        if self.window is not None or self.whole_images:
            return self._with_window(seq, tuple(blocks))
        return self._with_part(seq, tuple(blocks), tuple(slots))

    def _with_part(self, seq: Sequence, blocks: tuple[int, ...], slots: tuple[int, ...]) -> PrefixMatch:
        """Complete a match by the longest part of the next block that has a name or is being computed now."""
        limit = self._limit(seq, NOTHING_DROPPED)
        for _, name in reversed(self.names.image_ends(seq, len(blocks) + len(slots), limit)):
            cached = self.pool.find_part(name)
            if cached:
                return PrefixMatch(blocks, None, ("copy", *cached), slots)
            if name in self._pending:
                return PrefixMatch(blocks, self._pending[name], None, slots)
            part = self._find_rows(name)
            if part:
                return PrefixMatch(blocks, None, part, slots)
        return PrefixMatch(blocks, slots=slots)

    def _with_window(self, seq: Sequence, blocks: tuple[int, ...]) -> PrefixMatch:
        """Shorten a match to a prefix whose window is cached, too, and which does not end inside an image."""
        usable = len(blocks)
        if self.window is not None:
            usable = self.window.usable(seq.block_hashes, usable)
        if usable == len(blocks):
            match = self._with_part(seq, blocks, ())
            if match.pending is not None or match.part is None or self.window is None:
                return self._outside_images(seq, match)
            name = self.names.at(seq, self.matched_tokens(match))
            part = self.window.pool.find_part(name)
            if part is not None:
                return replace(match, window_part=part)
        return self._outside_images(seq, PrefixMatch(blocks[:usable]))

    def _outside_images(self, seq: Sequence, match: PrefixMatch) -> PrefixMatch:
        """Shorten a match that ends inside an image to the whole blocks before the image."""
        end = self.matched_tokens(match)
        inside = [span for span in seq.spans_between(end, end + 1) if span.start < end]
        if not self.whole_images or match.pending is not None or not inside:
            return match
        before = match.blocks[: inside[0].start // self.block_size]
        if self.window is not None:
            before = before[: self.window.usable(seq.block_hashes, len(before))]
        return self._outside_images(seq, PrefixMatch(before))

    def _limit(self, seq: Sequence, kept: Kept) -> int:
        """The most tokens of a sequence that need not be computed. kept: what it keeps already."""
        return max(0, min(seq.length - 1, self._point_after(seq, kept) - WINDOW))

    def _point_after(self, seq: Sequence, kept: Kept) -> int:
        return NEVER if seq.keep is None else next_point(seq.keep, len(seq.prompt_ids), kept, self.block_size)

    def point(self, seq: Sequence) -> int:
        """After how many tokens the sequence leaves out some of them next; NEVER: it does not."""
        return self._point_after(seq, seq.kept)

    def kept_at(self, seq: Sequence, kept: Kept, point: int) -> Kept:
        """Return what a sequence keeps at its next point. kept: what it has kept before."""
        assert seq.keep is not None
        return kept_at(seq.keep, point, kept, seq.visual_between(kept.until, point), self.block_size)

    def _match_kept(self, seq: Sequence) -> PrefixMatch | None:
        """The longest prefix whose kept rows are cached; None: there is none with a point in it."""
        stages, kept = [], NOTHING_DROPPED
        while (point := self._point_after(seq, kept)) < seq.length:
            kept = self.kept_at(seq, kept, point)
            stages.append(kept)
        self.names.fill(seq, (seq.length - 1) // self.block_size)
        for kept in reversed(stages):
            blocks: list[int] = []
            most = (self._limit(seq, kept) - kept.dropped) // self.block_size
            for name in self._kept_names(seq, kept, most):
                block = self.pool.find(name)
                if block is None:
                    break
                blocks.append(block)
            if len(blocks) * self.block_size >= kept.rows:
                return PrefixMatch(tuple(blocks), kept=kept)
        return None

    def _kept_names(self, seq: Sequence, kept: Kept, count: int) -> Iterator[bytes]:
        """The names of the first `count` blocks of a sequence. kept: what it keeps already.

        What is in the first ones follows from the rule and the tokens before the point. The others hold all
        tokens from there on, but their keys and values follow from the kept ones, too.
        """
        first, before = kept.rows // self.block_size, kept.until // self.block_size
        for index in range(count):
            name = seq.block_hashes[before - 1 if index < first else before + index - first]
            yield hashlib.sha256(
                b"fovea-kept:%d:%s:" % (min(index, first), str(seq.keep).encode()) + name
            ).digest()

    def _find_rows(self, name: bytes) -> Part | None:
        """Find the first rows of the block of that name. Returns None if they are not cached."""
        cached, saved = self.pool.find_part(name), self.host.find_part(name)
        if cached:
            return ("copy", *cached)
        return ("load", *saved) if saved else None

    def _with_state(
        self, states: Checkpoints, seq: Sequence, blocks: tuple[int, ...], slots: tuple[int, ...]
    ) -> PrefixMatch:
        """Shorten a match to the longest prefix whose state is saved, or is being computed now."""
        limit, match = seq.length - 1, PrefixMatch(())
        for position, name in states.candidates(seq, limit, len(blocks) + len(slots)):
            if states.slots.find(name) is None:
                continue
            index, rows = divmod(position, self.block_size)
            part = self._find_rows(name) if rows else None
            if part or not rows:
                some_slots = slots[: max(0, index - len(blocks))]
                match = PrefixMatch(blocks[:index], None, part, some_slots, state=name)
                break
        for position, name in states.awaited(seq, limit):
            if position > self.matched_tokens(match) and name in self._pending:
                return PrefixMatch((), self._pending[name])
        return match

    def matched_tokens(self, match: PrefixMatch) -> int:
        """The number of tokens that count as computed when a sequence is admitted with this match."""
        whole = len(match.blocks) + len(match.slots)
        return whole * self.block_size + (match.part[2] if match.part else 0) + match.kept.dropped

    def cached_prefix(self, seq: Sequence) -> int:
        """Estimate how many tokens of a new sequence are cached: whole blocks only, and no windows.

        Other threads may call it while the engine runs: every look-up is a single one.
        """
        if not self.share_prefixes or seq.scores_prompt:
            return 0
        count, tokens = self._limit(seq, NOTHING_DROPPED) // self.block_size, 0
        self.names.fill(seq, count)
        for number, name in enumerate(seq.block_hashes[:count], 1):
            if self.pool.find(name) is None and self.host.find(name) is None:
                break
            if self.states is None or self.states.slots.find(name) is not None:
                tokens = number * self.block_size
        return tokens

    def can_admit(self, seq: Sequence, match: PrefixMatch, beside: int = 0) -> bool:
        """Whether a sequence can be admitted with this match, and `beside` blocks are left for another one.

        Three things must fit into the free blocks: the free blocks of the match, the blocks that the sequence
        needs in addition, and the blocks that admitted sequences still need for the tokens they have now. A
        state needs a slot.
        """
        locked = sum(1 for block in match.blocks if self.pool.is_free(block))
        needed = sum(
            max(0, self.blocks_for(self.rows_of(other)) - len(other.blocks)) + self._to_replace(other)
            for other in self._sequences.values()
        )
        if self.states is not None and not self.states.slots.available:
            return False
        if self.window is not None:
            shared = self.window.shared(seq.block_hashes, len(match.blocks), self.matched_tokens(match))
            if not self.window.has_room(seq.length, shared, self._sequences.values()):
                return False
        own = self.blocks_for(self.rows_of(seq)) - len(match.blocks)
        if seq.keep is not None:
            own += self._to_compact(seq, match.kept, sum(not self.pool.is_free(b) for b in match.blocks))
        return own <= self.pool.free - locked - needed - beside

    def _to_replace(self, seq: Sequence) -> int:
        """Blocks that an admitted sequence needs at its next point, because others use some of its own."""
        if seq.keep is None or self.point(seq) > seq.length:
            return 0
        return self._to_compact(seq, seq.kept, sum(map(self.pool.is_shared, seq.blocks)))

    def _to_compact(self, seq: Sequence, kept: Kept, shared: int) -> int:
        """Blocks that the copy at the next point needs beside those that it releases.

        kept: what the sequence keeps already. shared: how many of its blocks others use.
        """
        point = self._point_after(seq, kept)
        if seq.keep is None or point > seq.length:
            return 0
        released = self.blocks_for(point - kept.dropped) - shared
        return max(0, self.blocks_for(room(seq.keep, point, self.block_size)) - released)

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        """Start the sequence's block table with the match, and plan the moves that the match needs.

        Other sequences with the same prefix wait for the blocks that this one is going to compute or load.
        """
        for block in match.blocks:
            self.pool.share(block)
        seq.blocks = list(match.blocks)
        seq.continue_from(match.kept)
        seq.computed_tokens = self.matched_tokens(match)
        if self.window is not None:
            self.window.admit(seq, len(match.blocks), seq.computed_tokens)
        self._sequences[seq.id] = seq
        self._fetch(seq, match)
        if not seq.preemptions:
            # After a preemption the sequence finds blocks that it computed itself: they do not count as cache
            # hits.
            cached = max(0, seq.computed_tokens - seq.computed_elsewhere)
            seq.cached_tokens = min(cached, len(seq.prompt_ids))
            self.hit_tokens += cached
            self.query_tokens += seq.length
        if self.states is not None:
            names = self.states.admit(seq, match.state)
        elif self.share_prefixes:
            last = len(seq.block_hashes)
            if seq.keep is not None:  # blocks after the first point get other names
                last = min(last, self.point(seq) // self.block_size) if not seq.kept.until else 0
            names = seq.block_hashes[len(match.blocks) : last]
            names = [*names, *self._future_part_names(seq)]
        else:
            names = seq.block_hashes[len(match.blocks) :]
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
                name = self.names.at(seq, whole * self.block_size + rows)
                self._loading.append((seq, last[0], name, rows))
        for slot in match.slots:
            index = len(seq.blocks)
            seq.blocks.append(self._take(seq, index))
            self._moves.append(Move("load", slot, seq.blocks[-1], self.block_size, seq.id))
            self._loading.append((seq, seq.blocks[-1], seq.block_hashes[index], self.block_size))
        seq.blocks += last
        if self.window is not None and match.window_part is not None:
            source, rows = match.window_part
            self.window.extend(seq, seq.computed_tokens)
            self._moves.append(Move("copy", source, seq.window_blocks[-1], rows, seq.id, windowed=True))
        self.host.unlock()
        self.host.loads += sum(move.kind == "load" and move.owner == seq.id for move in self._moves)

    def _take(self, seq: Sequence, index: int) -> int:
        """Take a block for entry `index` of the sequence's block table.

        If the block held a part of an image prefix, plan a move that saves it to host memory.
        """
        block = self.pool.next()
        if self.pool.kind(block) is not Kind.TEXT:
            name, parts = self.pool.names(block)
            slot = self.host.put(name, parts)
            if slot is not None:
                if self._announcer is not None and name is not None:
                    self._announcer.copied(HOST, name)
                self._moves.append(Move("save", block, slot, self.block_size))
        if seq.kept.until:  # kept rows, and those after them, are never looked for in host memory
            return self.pool.take(Kind.TEXT)
        return self.pool.take(self._kind(seq, index * self.block_size))

    def _kind(self, seq: Sequence, start: int) -> Kind:
        """The kind of the block of a sequence that begins with its token number `start`."""
        if seq.spans_between(start, start + self.block_size):
            return Kind.VISUAL
        return Kind.LEAD if seq.spans and start < seq.spans[-1].start else Kind.TEXT

    def can_rewind(self, seq: Sequence) -> bool:
        """Whether there are blocks for the copies that `rewind` makes."""
        return len(seq.blocks) - self._first_again(seq) <= self.pool.free

    def rewind(self, seq: Sequence) -> None:
        """Count the tokens that decide at the point as missing, so that they are computed again.

        Blocks that others may read are copied before, because not all kernels compute the same bits again.
        """
        table = list(seq.blocks)
        for index in range(self._first_again(seq), len(table)):
            block = table[index]
            if self.pool.is_shared(block) or self.pool.names(block) != (None, ()):
                table[index] = self._take(seq, index)
                self._moves.append(Move("copy", block, table[index], self.block_size, seq.id))
                self.pool.release(block)
        seq.blocks = table
        seq.computed_tokens = seq.decides_from(seq.length)

    def _first_again(self, seq: Sequence) -> int:
        """Number of the first block of the tokens that decide at the sequence's end."""
        return (seq.decides_from(seq.length) - seq.dropped) // self.block_size

    def can_compact(self, seq: Sequence) -> bool:
        """Whether there are blocks for the rows that a sequence keeps at the point that it has reached."""
        assert seq.keep is not None
        own = sum(not self.pool.is_shared(block) for block in seq.blocks)
        rows = room(seq.keep, seq.computed_tokens, self.block_size)
        return self.blocks_for(rows) <= self.pool.free + own

    def compact(self, seq: Sequence) -> None:
        """Copy the rows that a sequence keeps to blocks of its own, and release the others.

        The blocks that it had stay cached under their names, as far as nobody needs their memory.
        """
        before, old = seq.kept, seq.blocks
        kept = self.kept_at(seq, before, seq.computed_tokens)
        for block in reversed(old):
            self.pool.release(block)
        seq.blocks = []
        seq.continue_from(kept)
        for index in range(self.blocks_for(kept.rows)):
            seq.blocks.append(self._take(seq, index))
        self._moves.append(Compaction(tuple(old), tuple(seq.blocks), seq.id))
        self._compacted.append((seq, seq.blocks))
        self.dropped_tokens += kept.dropped - before.dropped

    def take_moves(self) -> tuple[Move | Compaction, ...]:
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
                if self._announcer is not None:
                    self._announcer.copied(DEVICE, name)
            else:
                self.pool.publish_part(block, name, rows)
            self._mark_available(seq, name)
        for seq, blocks in self._compacted:
            if seq.blocks is blocks:  # it still runs
                self._name_kept(seq, 0, seq.kept.rows // self.block_size)
        self._loading, self._compacted = [], []
        if self.states is not None:
            self.states.slots.unlock()

    def abandon_moves(self) -> None:
        """The step failed: which moves were carried out is unknown, so forget everything in host memory."""
        self._loading, self._compacted = [], []
        self.host.forget_all()
        if self.states is not None:
            self.states.slots.unlock()

    def forget_all(self) -> None:
        """Remove all names, in the pool and in host memory; blocks in use stay with their sequences."""
        self.pool.forget_all()
        self.host.forget_all()
        if self._announcer is not None:
            self._announcer.cleared()
        if self.window is not None:
            self.window.pool.forget_all()
        if self.states is not None:
            self.states.slots.forget_all()

    def adopt(self, seq: Sequence, position: int, *, windowed: bool = False) -> int | None:
        """Give a free block the name of a prefix whose keys and values come from another engine.

        The caller writes them into the block before the next step. Only what nobody uses is evicted for it.

        seq: any sequence that begins with this prefix.
        position: tokens of the prefix. If it ends inside a block, the block holds only the first rows.
        windowed: the block is one of layers with a sliding window.
        Returns the block; None: the prefix is cached already, or no block is free.
        """
        pool = self.pool if self.window is None or not windowed else self.window.pool
        name, rows = self.names.at(seq, position), position % self.block_size
        known = pool.find_part(name) if rows else pool.find(name)
        if known is not None or not pool.free or not self.share_prefixes:
            return None
        start = (position - 1) // self.block_size * self.block_size
        block = pool.take(self._kind(seq, start))
        if rows:
            pool.publish_part(block, name, rows)
        else:
            pool.publish(block, name)
            if self._announcer is not None and pool is self.pool:
                self._announcer.computed(seq, position // self.block_size - 1, position // self.block_size)
        pool.release(block)
        return block

    def adopt_state(self, seq: Sequence, position: int) -> int | None:
        """Take a slot for the state after a prefix, which comes from another engine. See `adopt`."""
        return None if self.states is None else self.states.adopt(seq, position)

    def _future_part_names(self, seq: Sequence) -> list[bytes]:
        """The names that first rows of blocks will get. After a point there are none."""
        if seq.kept.until:
            return []
        spans = [span for span in seq.spans if seq.computed_tokens < span.end <= self.point(seq)]
        ends = {span.end // self.block_size for span in spans}
        named = [index for index in ends if index <= len(seq.block_hashes)]
        return [name for index in named for _, name in self.names.image_ends(seq, index, seq.length)]

    def can_extend(self, seq: Sequence, tokens: int) -> bool:
        if self.window is not None and self.window.missing(seq, tokens) > self.window.pool.free:
            return False
        missing = -((seq.dropped - tokens) // self.block_size) - len(seq.blocks)
        return missing <= 0 or missing <= self.pool.free

    @property
    def keeps_states(self) -> bool:
        """Whether sequences have states, which a step overwrites."""
        return self.states is not None

    def can_extend_quietly(self, seq: Sequence, tokens: int) -> bool:
        """Whether `seq` can be extended without a move: no evicted block is saved to host memory."""
        fits = len(seq.blocks) * self.block_size >= tokens - seq.dropped
        return fits or (self.host.size == 0 and self.can_extend(seq, tokens))

    def extend(self, seq: Sequence, tokens: int) -> None:
        """Take blocks until `seq` has room for its first `tokens` tokens.

        Raises KeyError when no block is free.
        """
        blocks = -((seq.dropped - tokens) // self.block_size)
        while len(seq.blocks) < blocks:
            seq.blocks.append(self._take(seq, len(seq.blocks)))
        if self.window is not None:
            self.window.extend(seq, tokens)

    def plan_state(self, seq: Sequence, count: int) -> StateWork | None:
        """Plan the state slots of the next `count` tokens; None: the model has no states."""
        return None if self.states is None else self.states.plan(seq, count)

    def most_drafts(self) -> int | None:
        """How many drafts have a slot for the state after them; None: the model has no states."""
        return None if self.states is None else self.states.slots.spare

    def commit(self, seq: Sequence, count: int, known: int) -> None:
        """Count `count` more tokens as computed, and name the blocks and parts that became complete.

        known: length of the sequence before the step's new tokens; tokens beyond it are accepted drafts.
        """
        first = seq.computed_tokens
        seq.computed_tokens += count
        after = seq.computed_tokens // self.block_size
        for name in () if self.states is None else self.states.commit(seq, known):
            self._mark_available(seq, name)
        if self.share_prefixes and (seq.spans or after > first // self.block_size):
            self._name_new(seq, first, after)
        if self.window is not None:
            self.window.release_behind(seq)

    def _name_kept(self, seq: Sequence, first: int, last: int) -> None:
        """Name the full blocks [first, last) of a sequence that has left out tokens.

        With a share there are none: only an equal prompt could use the blocks.
        """
        if not self.share_prefixes or seq.keep is None or seq.keep.share:
            return
        for index, name in enumerate(self._kept_names(seq, seq.kept, last)):
            if index >= first:
                self.pool.publish(seq.blocks[index], name)

    def _name_new(self, seq: Sequence, first: int, whole: int) -> None:
        """Name the blocks and parts that became complete.

        first: first token that the step computed. whole: number of blocks that are full now.
        """
        self.names.fill(seq, whole)
        if seq.kept.until:
            size, dropped = self.block_size, seq.dropped
            self._name_kept(seq, (first - dropped) // size, (seq.computed_tokens - dropped) // size)
            return
        for span in seq.spans_between(first, seq.computed_tokens):
            if span.end <= seq.computed_tokens and span.end % self.block_size:
                index = span.end // self.block_size
                for rows, name in self.names.image_ends(seq, index, span.end):
                    self.pool.publish_part(seq.blocks[index], name, rows)
                    if self.window is not None:
                        self.window.publish(seq, index, name, rows)
                    self._mark_available(seq, name)
        for index in range(first // self.block_size, whole):
            name = seq.block_hashes[index]
            self.pool.publish(seq.blocks[index], name)
            if self.window is not None:
                self.window.publish(seq, index, name)
            self._mark_available(seq, name)
        if self._announcer is not None:
            self._announcer.computed(seq, first // self.block_size, whole)

    def _mark_available(self, seq: Sequence, name: bytes) -> None:
        if self._pending.get(name) == seq.id:
            del self._pending[name]
            self._expected[seq.id].discard(name)

    def release(self, seq: Sequence, *, intact: bool = True) -> None:
        """Release all blocks of the sequence; named blocks can still be found by later sequences.

        The last block is released first and so evicted first, because without the earlier blocks it cannot be
        reused.

        intact: false if a step failed that may have changed the sequence's state.
        """
        if self.states is not None:
            self.states.release(seq, keep=intact)
        for block in reversed(seq.blocks):
            self.pool.release(block)
        if self.window is not None:
            self.window.release(seq)
        for name in self._expected.pop(seq.id, ()):
            del self._pending[name]
        seq.blocks = []
        seq.computed_tokens = 0
        seq.continue_from(NOTHING_DROPPED)
        self._sequences.pop(seq.id, None)

    def check_integrity(self) -> None:
        self.host.check_integrity()
        if self.states is not None:
            self.states.check_integrity()
        if self.window is not None:
            self.window.check_integrity(self._sequences.values())
        self.pool.check_integrity([seq.blocks for seq in self._sequences.values()])
        stale = set(self._pending.values()) - set(self._sequences)
        if stale:
            raise RuntimeError(f"prefixes are expected from sequences that have ended: {sorted(stale)[:4]}")
        expected = {(name, owner) for owner, names in self._expected.items() for name in names}
        if expected != set(self._pending.items()):
            raise RuntimeError("the names expected from each sequence and the pending prefixes do not agree")


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix of a sequence whose KV is available, in the pool or in host memory.

    blocks: numbers of the cached blocks, from the start of the sequence on.
    pending: id of the sequence that is computing or loading the next block now; None if there is none.
    part: ("copy", block, rows) or ("load", slot, rows), whose first rows are the next rows of the sequence.
    slots: numbers of the host slots that hold the blocks after `blocks`.
    window_part: (block, rows) like `part`, in the pool of layers with a sliding window.
    state: name of the checkpoint of the state after this prefix; None: there is none, or the model has no
        states.
    kept: what is kept of the prefix; the blocks hold these rows.
    """

    blocks: tuple[int, ...]
    pending: str | None = None
    part: tuple[Literal["copy", "load"], int, int] | None = None
    slots: tuple[int, ...] = ()
    window_part: tuple[int, int] | None = None
    state: bytes | None = None
    kept: Kept = NOTHING_DROPPED


@dataclass(frozen=True, slots=True)
class Compaction:
    """A copy of the rows that a sequence keeps, in every layer, to the first rows of other blocks.

    Which rows these are is known to the runner since the step before. A block may be in both tables.

    source: the block table that the sequence had.
    target: its new one.
    owner: id of the sequence.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    owner: str
    kind: Literal["compact"] = "compact"


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of the first `rows` rows of one KV block.

    kind: "copy" from block to block, "save" from a block to a host slot, "load" from a host slot to a block.
    source: number of the block or slot to read.
    target: number of the block or slot to write.
    rows: how many rows are copied, from the first on.
    owner: id of the sequence that needs the rows; empty for saves.
    windowed: the blocks are those of layers with a sliding window.
    """

    kind: Literal["copy", "save", "load"]
    source: int
    target: int
    rows: int
    owner: str = ""
    windowed: bool = False
