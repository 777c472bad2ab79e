"""Slots of host memory for blocks of image prefixes that the pool evicts, indexed by the names of the blocks.

Device memory is small and expensive, and a follow-up question reuses the KV of an image. Blocks of text alone
are not saved: computing them again takes about as long as a copy. This module holds integers only, like the
pool; the runner owns the tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

Part = tuple[bytes, int]
"""The name of a block's first rows, and the number of those rows."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes | None
    parts: tuple[Part, ...]


class HostBlocks:
    """The account of host memory slots: at most `slots` blocks; the least recently used is evicted first.

    Locked slots are not evicted.
    size: number of slots.
    loads: blocks loaded back to the pool so far.
    evictions: slots reused for another block so far.
    """

    def __init__(self, slots: int) -> None:
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
        self._entries.clear()
        self._by_name.clear()
        self._by_part.clear()
        self._blank = list(range(self.size))

    def _room(self) -> int | None:
        if self._blank:
            return self._blank.pop()
        slot = next((slot for slot in self._entries if slot not in self._locked), None)
        if slot is None:
            return None
        entry = self._entries.pop(slot)
        if entry.name is not None:
            del self._by_name[entry.name]
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
