"""States of sequences, for models with layers whose memory is a state of fixed size: slots and checkpoints.

A running sequence has one slot, which every step overwrites. The other slots hold checkpoints: copies of a
state after a certain prefix, by the name of that prefix. A later sequence that begins with the same tokens
continues from there, as it does from KV blocks. A checkpoint whose slot is needed is evicted, the least
recently used first. This module holds integers only; the runner owns the tensors.

KV has rows for every token, so a sequence can continue after any prefix whose blocks are cached. A state
contains no earlier state: a sequence can continue only after prefixes for which a copy was saved. These end
at the end of each image, before the last token of a prompt (a repeated prompt computes that token again, a
follow-up continues from there), at multiples of `StateSlots.spacing`, and where a sequence ended or was
preempted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import zip_longest

from fovea.engine.kv.blocks import BlockPool
from fovea.engine.kv.hashing import PrefixNames
from fovea.engine.sequence import Sequence, SequenceState, StateWork
from fovea.kernels import NO_SLOT


class StateSlots:
    """The account of all slots: free, in use by a sequence, or a checkpoint. Not thread-safe.

    size: number of slots.
    spacing: tokens between two checkpoints of a prompt, beside those at the ends of images and of the prompt;
        0: only those at the ends.
    evictions: checkpoints whose slot was taken for something else.
    """

    def __init__(self, size: int, spacing: int) -> None:
        self.size = size
        self.spacing = spacing
        self.evictions = 0
        self._free = list(range(size))
        self._by_name: OrderedDict[bytes, int] = OrderedDict()
        self._parts: dict[bytes, dict[int, int]] = {}
        self._part_of: dict[bytes, tuple[bytes, int]] = {}
        self._locked: set[int] = set()

    @property
    def available(self) -> int:
        """Number of slots that can be taken now, checkpoints included."""
        return len(self._free) + len(self._by_name) - len(self._locked)

    @property
    def spare(self) -> int:
        """Number of slots for drafts. Half of all slots stay with checkpoints."""
        return len(self._free) + max(0, len(self._by_name) - len(self._locked) - self.size // 2)

    @property
    def used(self) -> int:
        """Number of slots that sequences use."""
        return self.size - len(self._free) - len(self._by_name)

    @property
    def checkpoints(self) -> int:
        return len(self._by_name)

    def take(self) -> int | None:
        """Take a free slot, or that of the least recently used checkpoint; None: there is no slot."""
        if self._free:
            return self._free.pop()
        for name, slot in self._by_name.items():
            if slot not in self._locked:
                self._forget(name)
                self.evictions += 1
                return slot
        return None

    def take_over(self, name: bytes) -> int:
        """Take the slot of a checkpoint together with its state. The checkpoint is gone."""
        slot = self._by_name[name]
        self._locked.discard(slot)
        self._forget(name)
        self.evictions += 1
        return slot

    def give(self, slot: int) -> None:
        """Return a slot that a sequence used."""
        self._free.append(slot)

    def find(self, name: bytes) -> int | None:
        return self._by_name.get(name)

    def lock(self, name: bytes) -> int:
        """Mark a checkpoint as used, and keep it until `unlock`, because a step is about to read it."""
        slot = self._by_name[name]
        self._by_name.move_to_end(name)
        self._locked.add(slot)
        return slot

    def unlock(self) -> None:
        self._locked.clear()

    def publish(self, name: bytes, slot: int) -> None:
        """Turn a sequence's slot into the checkpoint of that name.

        If there is one already, both hold the same state, and the slot becomes free.
        """
        if name in self._by_name:
            self._by_name.move_to_end(name)
            self._free.append(slot)
        else:
            self._by_name[name] = slot

    def note_part(self, parent: bytes, rows: int, name: bytes) -> None:
        """Remember that `name` belongs to the first `rows` rows of a block after the block named `parent`.

        A sequence cannot know where other prompts ended. `parts_after` tells it which prefixes to look up.
        """
        if name not in self._part_of:
            self._part_of[name] = parent, rows
            counts = self._parts.setdefault(parent, {})
            counts[rows] = counts.get(rows, 0) + 1

    def drop_part(self, name: bytes) -> None:
        """Undo `note_part`, unless there is a checkpoint of that name."""
        if name in self._by_name or name not in self._part_of:
            return
        parent, rows = self._part_of.pop(name)
        counts = self._parts[parent]
        counts[rows] -= 1
        if not counts[rows]:
            del counts[rows]
        if not counts:
            del self._parts[parent]

    def parts_after(self, parent: bytes) -> list[int]:
        """Numbers of first rows of the next block that have names, descending."""
        return sorted(self._parts.get(parent, ()), reverse=True)

    def forget_all(self) -> None:
        """Remove all checkpoints that no step is about to read."""
        for name, slot in list(self._by_name.items()):
            if slot not in self._locked:
                self._forget(name)
                self._free.append(slot)

    def _forget(self, name: bytes) -> None:
        del self._by_name[name]
        self.drop_part(name)

    def check_integrity(self, states: list[SequenceState]) -> None:
        """Raise RuntimeError unless every slot is free, a checkpoint, or in use by one sequence."""
        used = [
            slot
            for state in states
            for slot in (state.slot, *state.drafts, *(slot for _, slot, _ in state.saves))
        ]
        if sorted([*self._free, *self._by_name.values(), *used]) != list(range(self.size)):
            raise RuntimeError("a state slot is lost, or belongs to two owners")
        counted = {(parent, rows) for parent, counts in self._parts.items() for rows in counts}
        if counted != set(self._part_of.values()):
            raise RuntimeError("the two indexes of checkpoints inside blocks do not agree")


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

    def adopt(self, seq: Sequence, position: int) -> int | None:
        """Take a slot for a checkpoint after a prefix of a sequence, whose state comes from elsewhere.

        The rows of KV that belong to it must have their name already, if it ends inside a block.
        Returns the slot; None: there is one of this name, or none is free.
        """
        name = self._names.at(seq, position)
        slot = None if self.slots.find(name) is not None else self.slots.take()
        if slot is not None:
            self.slots.publish(name, slot)
            self._note(seq, position, name)
        return slot

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
