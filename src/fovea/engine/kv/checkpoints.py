"""States of sequences beside their KV blocks: which checkpoints to save, and which to continue from.

KV has rows for every token, so a sequence can continue after any prefix whose blocks are cached. A state
contains no earlier state: a sequence can continue only after prefixes for which a copy was saved. These end
at the end of each image, before the last token of a prompt (a repeated prompt computes that token again, a
follow-up continues from there), at multiples of `StateSlots.spacing`, and where a sequence ended or was
preempted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest

from fovea.engine.kv.blocks import BlockPool
from fovea.engine.kv.names import PrefixNames
from fovea.engine.kv.state_slots import StateSlots
from fovea.engine.sequence import Sequence, SequenceState, StateWork
from fovea.kernels import NO_SLOT


class Checkpoints:
    """The states of all admitted sequences, and the checkpoints that sequences share. Not thread-safe.

    slots: account of the slots.
    """

    def __init__(self, slots: StateSlots, names: PrefixNames, pool: BlockPool, *, share: bool) -> None:
        """names: calculates names of prefixes. pool: KV blocks; parts of them get names, too.

        share: save and use checkpoints.
        """
        self.slots = slots
        self._names = names
        self._pool = pool
        self._share = share
        self._sequences: dict[str, Sequence] = {}
        self._due: Counter[int] = Counter()

    def awaited(self, seq: Sequence, limit: int) -> Iterator[tuple[int, bytes]]:
        """Yield the prefixes of at most `limit` tokens that running sequences may be about to save.

        Each is a number of tokens and a name, the longest first. Only the name tells whether the prefix is
        the same.
        """
        size = self._names.block_size
        self._names.fill(seq, limit // size)
        for position in sorted(self._due, reverse=True):
            index, rows = divmod(position, size)
            if position <= limit and (
                not rows or rows in self.slots.parts_after(self._names.parent(seq, index))
            ):
                yield position, self._names.at(seq, position)

    def candidates(self, seq: Sequence, limit: int, blocks: int) -> Iterator[tuple[int, bytes]]:
        """Yield prefixes of at most `limit` tokens that may be saved, the longest first.

        Each is a number of tokens and a name.

        blocks: number of whole blocks whose KV is cached; longer prefixes cannot be reused.
        """
        size = self._names.block_size
        self._names.fill(seq, limit // size)
        for index in range(min(limit // size, blocks), -1, -1):
            parent = self._names.parent(seq, index)
            for rows in self.slots.parts_after(parent):
                position = index * size + rows
                if position <= limit:
                    yield position, self._names.at(seq, position)
            if index:
                yield index * size, parent

    def admit(self, seq: Sequence, name: bytes | None) -> list[bytes]:
        """Give a sequence a slot. There must be one.

        name: the checkpoint from which it continues; None: it begins.
        Returns the names of the checkpoints that it is going to save.
        """
        source = NO_SLOT if name is None else self.slots.lock(name)
        slot = self.slots.take()
        if slot is None and name is not None:
            slot = self.slots.take_over(name)  # there is no room for the checkpoint beside the sequence
        if slot is None:
            raise RuntimeError(f"sequence {seq.id} is admitted, but no state slot is available")
        seq.state = SequenceState(slot, source, self._positions(seq) if self._share else [])
        self._sequences[seq.id] = seq
        self._due.update(seq.state.due)
        expected = []
        for position in seq.state.due:
            expected.append(self._names.at(seq, position))
            self._note(seq, position, expected[-1])
        return expected

    def _positions(self, seq: Sequence) -> list[int]:
        """Positions of the prompt that are to be saved and are not computed yet, ascending."""
        last = len(seq.prompt_ids) - 1
        ends = {
            span.end
            for span, later in zip_longest(seq.spans, seq.spans[1:])
            if later is None or later.index != span.index or later.time <= span.time
        }
        spaced = range(self.slots.spacing, last, self.slots.spacing) if self.slots.spacing else ()
        return sorted(p for p in {last, *ends, *spaced} if seq.computed_tokens < p <= last)

    def plan(self, seq: Sequence, count: int) -> StateWork:
        """Plan the slots for the next `count` tokens of a sequence.

        A checkpoint for which there is no slot is left out.
        """
        state = seq.state
        assert state is not None
        start, stop = seq.computed_tokens, seq.computed_tokens + count
        known = min(stop, seq.length)
        saves = [(known, state.slot)]
        for position in range(known + 1, stop + 1):
            slot = self.slots.take()
            if slot is None:
                raise RuntimeError(f"no state slot is available for a draft of sequence {seq.id}")
            state.drafts.append(slot)
            saves.append((position, slot))
        for position in [position for position in state.due if start < position <= known]:
            name = self._names.at(seq, position)
            slot = None if self.slots.find(name) is not None else self.slots.take()
            if slot is not None:
                state.saves.append((position, slot, name))
        checkpoints = [(position, slot) for position, slot, _ in state.saves]
        return StateWork(state.source, (*checkpoints, *saves))

    def commit(self, seq: Sequence, known: int) -> list[bytes]:
        """The step's tokens of a sequence are computed: name its checkpoints, and drop rejected drafts.

        known: length of the sequence before the step's new tokens; `seq.computed_tokens` counts them.
        Returns the names for which others may have waited, whether they were saved or not.
        """
        state = seq.state
        assert state is not None
        for position, slot, name in state.saves:
            self._publish(seq, position, name, slot)
        passed = [p for p in state.due if p <= seq.computed_tokens]
        names = [self._names.at(seq, position) for position in passed]
        state.due = state.due[len(passed) :]
        self._drop_due(passed)
        accepted = max(0, seq.computed_tokens - known)
        for number, slot in enumerate(state.drafts, 1):
            if number == accepted:
                slot, state.slot = state.slot, slot
            self.slots.give(slot)
        state.saves, state.drafts, state.source = [], [], state.slot
        for name in names:
            self.slots.drop_part(name)
        return names

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """Take the slots of a sequence back. Call it before the sequence's blocks are released.

        keep: the state is that after `seq.computed_tokens` tokens; save it as a checkpoint.
        """
        state = seq.state
        if state is None:
            return
        for slot in (*state.drafts, *(slot for _, slot, _ in state.saves)):
            self.slots.give(slot)
        expected = [self._names.at(seq, position) for position in state.due]
        self._drop_due(state.due)
        if keep and self._share and state.source == state.slot and seq.computed_tokens:
            name = self._names.at(seq, seq.computed_tokens)
            self._publish(seq, seq.computed_tokens, name, state.slot)
        else:
            self.slots.give(state.slot)
        for name in expected:
            self.slots.drop_part(name)
        seq.state = None
        del self._sequences[seq.id]

    def _drop_due(self, positions: list[int]) -> None:
        self._due.subtract(positions)
        for position in positions:
            if not self._due[position]:
                del self._due[position]

    def _note(self, seq: Sequence, position: int, name: bytes) -> None:
        index, rows = divmod(position, self._names.block_size)
        if rows:
            self.slots.note_part(self._names.parent(seq, index), rows, name)

    def _publish(self, seq: Sequence, position: int, name: bytes, slot: int) -> None:
        """Make a slot a checkpoint, and name the rows of KV that belong to it if they end inside a block."""
        self.slots.publish(name, slot)
        self._note(seq, position, name)
        index, rows = divmod(position, self._names.block_size)
        if rows:
            self._pool.publish_part(seq.blocks[index], name, rows)

    def check_integrity(self) -> None:
        self.slots.check_integrity([seq.state for seq in self._sequences.values() if seq.state is not None])
