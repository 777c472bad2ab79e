"""The encoder-output cache: outputs by content, bounded in bytes.

Values are opaque. An output that a sequence still needs is *held*: it stays whatever the ceiling says, because a step is
about to read it. It returns to the ordinary least-recently-used order when its last holder releases it. So a cache with
room for one of two images is useless, but the engine never gets stuck.

With a time to live, an output of that age is a miss for every sequence that does not hold it already.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fovea.core.ledger import Ledger

Value = TypeVar("Value")


@dataclass(slots=True)
class _Output(Generic[Value]):
    """An output and the ids of the sequences that hold it."""

    value: Value
    holders: set[str]


class EmbeddingCache(Generic[Value]):
    """Encoder outputs and their holders; for one thread.

    bytes: of all outputs. held_bytes: of those that are held.
    hits: holds of an output that was here. misses: outputs that were encoded.
    """

    def __init__(
        self,
        capacity: int,
        *,
        ttl_s: float | None = None,
        evicted: Callable[[str, Value], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """capacity: ceiling in bytes. ttl_s: time to live in seconds; None: no bound.

        evicted: called with key and value of every output that is removed for lack of room, unless it is stale. It must
            not block. Outputs that are cleared or expire are not reported.
        """
        self.hits = 0
        self.misses = 0
        self._evicted = evicted
        self._held = 0
        self._ledger: Ledger[str, _Output[Value]] = Ledger(
            capacity, ttl_s=ttl_s, clock=clock, pinned=lambda output: bool(output.holders)
        )

    @property
    def capacity(self) -> int:
        return self._ledger.capacity

    @property
    def bytes(self) -> int:
        return self._ledger.bytes

    @property
    def evictions(self) -> int:
        return self._ledger.evictions

    @property
    def expired(self) -> int:
        return self._ledger.expirations

    @property
    def held_bytes(self) -> int:
        return self._held

    @property
    def keys(self) -> list[str]:
        """The keys of all outputs, least recently used first."""
        return list(self._ledger)

    def __len__(self) -> int:
        return len(self._ledger)

    def __contains__(self, key: str) -> bool:
        return self._ledger.fresh(key) is not None

    def hold(self, key: str, holder: str, within: int | None = None) -> bool:
        """Keep an output for a sequence until it is released.

        within: bound on the held bytes. False: the output is not here and must be encoded, or the bound would be exceeded.
        """
        entry = self._ledger.entry(key)
        if entry is None:
            return False
        holders = entry.value.holders
        if holder not in holders and self._ledger.is_stale(entry.created):
            return False
        if within is not None and not holders and self._held + entry.size > within:
            return False
        self._ledger.touch(key)
        if holder not in holders:
            self.hits += 1
            self._held += 0 if holders else entry.size
            holders.add(holder)
        return True

    def restore(
        self,
        key: str,
        value: Value,
        size: int,
        holder: str,
        created: float | None = None,
        within: int | None = None,
    ) -> bool:
        """Store an output that was read from a slower tier, for a sequence that waits for it.

        created: when it was encoded. within: bound on the held bytes; False: it would be exceeded.
        """
        if self.hold(key, holder, within):
            return True
        entry = self._ledger.entry(key)
        held = self._held - (entry.size if entry is not None and entry.value.holders else 0)
        if within is not None and held + size > within:
            return False
        self._store(key, value, size, {holder}, created)
        return True

    def put(self, key: str, value: Value, size: int, holders: set[str], created: float | None = None) -> None:
        """Store an output of `size` bytes for the sequences that wait for it. created: when it was encoded; None: now."""
        self.misses += 1
        self._store(key, value, size, holders, created)

    def keep(self, key: str, value: Value, size: int, created: float) -> None:
        """Store an output that was needed to make another one: no sequence waits for it, and it counts as no miss. It
        becomes the most recently used one, whether it was here or not."""
        self._store(key, value, size, set(), created)

    def get(self, key: str) -> Value:
        """The value. Raises KeyError; never for an output that is held."""
        output = self._ledger.get(key)
        if output is None:
            raise KeyError(key)
        return output.value

    def release(self, key: str, holder: str) -> None:
        entry = self._ledger.entry(key)
        if entry is not None and holder in entry.value.holders:
            entry.value.holders.discard(holder)
            self._held -= 0 if entry.value.holders else entry.size
            self._shrink()

    def drop(self, key: str) -> None:
        """Remove an output unless it is held."""
        output = self._ledger.get(key)
        if output is not None and not output.holders:
            self._ledger.remove(key)

    def clear(self) -> None:
        """Remove all outputs that are not held."""
        self._ledger.clear()

    def check_integrity(self, holders: set[str]) -> None:
        """Raise RuntimeError unless the bytes add up and only `holders` hold anything."""
        self._ledger.check_integrity("the encoder-output cache")
        entries = [entry for key in self._ledger if (entry := self._ledger.entry(key)) is not None]
        if self._held != sum(entry.size for entry in entries if entry.value.holders):
            raise RuntimeError("the encoder-output cache lost count of the held bytes")
        gone = {holder for entry in entries for holder in entry.value.holders} - holders
        if gone:
            raise RuntimeError(f"encoder outputs are held by sequences that are gone: {sorted(gone)[:4]}")
        if not holders and self.bytes > self.capacity:
            raise RuntimeError(f"{self.bytes} bytes kept, {self.capacity} allowed")

    def _store(
        self, key: str, value: Value, size: int, holders: set[str], created: float | None = None
    ) -> None:
        old = self._ledger.remove(key)
        if old is not None and old.value.holders:
            self._held -= old.size
            holders = holders | old.value.holders
        self._ledger.add(key, _Output(value, set(holders)), size, created)
        self._held += size if holders else 0
        self._ledger.expire()
        self._shrink()

    def _shrink(self) -> None:
        for key, entry in self._ledger.evict():
            if self._evicted is not None and not self._ledger.is_stale(entry.created):
                self._evicted(key, entry.value.value)
