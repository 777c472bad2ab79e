"""Encoder outputs by content, bounded in bytes.

Values are opaque: this file counts bytes and knows who still needs what. Something that a running sequence needs is
*held*: it stays reachable whatever the ceiling says, because a step is about to read it, and returns to the ordinary
LRU when the last holder lets go. So two images with room for one make the cache useless, never the engine stuck.

With a time to live, an output is a miss once it is that old, for everybody but those who hold it already.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(slots=True)
class _Entry(Generic[Value]):
    value: Value
    size: int
    made: float
    holders: set[str]


class EmbeddingCache(Generic[Value]):
    """evicted: told what leaves for want of room, key and value; it must not wait. Nothing else is told: what was
    cleared, or is too old, is gone."""

    def __init__(
        self,
        capacity: int,
        *,
        ttl_s: float | None = None,
        evicted: Callable[[str, Value], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.capacity = capacity
        self._ttl_s = ttl_s
        self._evicted = evicted
        self._clock = clock
        self.expired = 0
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._held = 0
        self._entries: OrderedDict[str, _Entry[Value]] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        """What running and waiting sequences hold on to."""
        return self._held

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not self._is_stale(entry)

    def hold(self, key: str, holder: str, within: int | None = None) -> bool:
        """Keep `key` for `holder` until it is released. False: it is not here and must be encoded, or more than `within`
        bytes would be held."""
        entry = self._entries.get(key)
        if entry is None or (holder not in entry.holders and self._is_stale(entry)):
            return False
        if within is not None and not entry.holders and self._held + entry.size > within:
            return False
        self._entries.move_to_end(key)
        if holder not in entry.holders:
            self.hits += 1
            self._held += 0 if entry.holders else entry.size
            entry.holders.add(holder)
        return True

    def restore(
        self,
        key: str,
        value: Value,
        size: int,
        holder: str,
        made: float | None = None,
        within: int | None = None,
    ) -> bool:
        """Store what was not encoded but read from a slower tier, for one who waits for it. made: when it was encoded.

        False: more than `within` bytes would be held.
        """
        if self.hold(key, holder, within):
            return True
        entry = self._entries.get(key)
        held = self._held - (entry.size if entry is not None and entry.holders else 0)
        if within is not None and held + size > within:
            return False
        self._store(key, value, size, {holder}, made)
        return True

    def put(self, key: str, value: Value, size: int, holders: set[str], made: float | None = None) -> None:
        """Store an encoder output of `size` bytes for those who wait for it. made: when it was encoded; None: now."""
        self.misses += 1
        self._store(key, value, size, holders, made)

    def keep(self, key: str, value: Value, size: int, made: float) -> None:
        """Store what was needed on the way to another output: nobody waits for it, and nobody missed it. It is the latest
        used, whether it was here or not."""
        self._store(key, value, size, set(), made)

    def _store(self, key: str, value: Value, size: int, holders: set[str], made: float | None = None) -> None:
        old = self._entries.pop(key, None)
        if old is not None:
            self.bytes -= old.size
            self._held -= old.size if old.holders else 0
            holders = holders | old.holders
        self._entries[key] = _Entry(value, size, self._clock() if made is None else made, set(holders))
        self.bytes += size
        self._held += size if holders else 0
        self._expire()
        self._shrink()

    def get(self, key: str) -> Value:
        """The value. Raises KeyError; never for one that is held."""
        return self._entries[key].value

    def release(self, key: str, holder: str) -> None:
        entry = self._entries.get(key)
        if entry is not None and holder in entry.holders:
            entry.holders.discard(holder)
            self._held -= 0 if entry.holders else entry.size
            self._shrink()

    def drop(self, key: str) -> None:
        """Lose an entry on purpose. A held one stays until it is released."""
        entry = self._entries.get(key)
        if entry is not None and not entry.holders:
            del self._entries[key]
            self.bytes -= entry.size

    def clear(self) -> None:
        for key in list(self._entries):
            self.drop(key)

    def _is_stale(self, entry: _Entry[Value]) -> bool:
        return self._ttl_s is not None and self._clock() - entry.made >= self._ttl_s

    def _expire(self) -> None:
        if self._ttl_s is None:
            return
        for key in [k for k, entry in self._entries.items() if not entry.holders and self._is_stale(entry)]:
            self.drop(key)
            self.expired += 1

    def _shrink(self) -> None:
        if self.bytes <= self.capacity:
            return
        for key in [k for k, entry in self._entries.items() if not entry.holders]:
            entry = self._entries.pop(key)
            self.bytes -= entry.size
            self.evictions += 1
            if self._evicted is not None and not self._is_stale(entry):
                self._evicted(key, entry.value)
            if self.bytes <= self.capacity:
                return

    def check_integrity(self, holders: set[str]) -> None:
        """Raise RuntimeError unless the byte count is right and only `holders` hold anything."""
        if self.bytes != sum(entry.size for entry in self._entries.values()):
            raise RuntimeError("the encoder-output cache lost count of its bytes")
        if self._held != sum(entry.size for entry in self._entries.values() if entry.holders):
            raise RuntimeError("the encoder-output cache lost count of what is held")
        stale = {h for entry in self._entries.values() for h in entry.holders} - holders
        if stale:
            raise RuntimeError(f"encoder outputs are held by sequences that are gone: {sorted(stale)[:4]}")
        if not holders and self.bytes > self.capacity:
            raise RuntimeError(f"{self.bytes} bytes kept, {self.capacity} allowed")
