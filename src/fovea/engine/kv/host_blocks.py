"""Where blocks of image prefixes go when the pool gives them up: slots of host memory, by the names they had.

A device's memory is small and dear, and an image's KV is what a follow-up question saves. Text is not kept: it is
computed again in about the time of a copy. Integers only, like the pool: the tensors are the runner's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

Part = tuple[bytes, int]
"""The name of a block's first rows, and how many they are."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes | None
    parts: tuple[Part, ...]


class HostBlocks:
    """`slots` blocks at most; the least recently used goes first. What is locked stays."""

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
        """A slot for a block of these names, which the caller fills. None: there is nothing new, or no room."""
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
        """(slot, rows)."""
        return self._by_part.get(name)

    def lock(self, slots: set[int]) -> None:
        """What these hold is about to be loaded; they also count as used now."""
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
        """Raise RuntimeError unless every slot is blank or named, once."""
        if sorted([*self._blank, *self._entries]) != list(range(self.size)):
            raise RuntimeError("host slots are lost or counted twice")
        names = {entry.name: slot for slot, entry in self._entries.items() if entry.name is not None}
        parts = {part: (slot, rows) for slot, entry in self._entries.items() for part, rows in entry.parts}
        if names != self._by_name or parts != self._by_part:
            raise RuntimeError("the names of host slots do not add up")
