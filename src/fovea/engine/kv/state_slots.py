"""Slots for the states of sequences, for models with layers whose memory is a state of fixed size.

A running sequence has one slot, which every step overwrites. The other slots hold checkpoints: copies of a
state after a certain prefix, by the name of that prefix. A later sequence that begins with the same tokens
continues from there, as it does from KV blocks. A checkpoint whose slot is needed is evicted, the least
recently used first. This module holds integers only; the runner owns the tensors.
"""

from __future__ import annotations

from collections import OrderedDict

from fovea.engine.sequence import SequenceState


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
