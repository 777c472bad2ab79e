"""The caches on the device, bounded in bytes: encoder outputs, and encoded regions of images.

Values are opaque. An output that a sequence still needs is *held*: it is never evicted, even above the
ceiling, because a step is about to read it. When its last holder releases it, it can be evicted in
least-recently-used order. So if the cache is too small for the images of a step, it has no hits, but the
engine does not deadlock. Of regions, the least relevant one is evicted first.

With shares, one client cannot evict what others stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fovea.core.ledger import Ledger, LedgerStore

Value = TypeVar("Value")
Watch = Callable[[str, int | None], None]
"""Told of every entry that comes, with its size, and of every one that goes, with None."""


@dataclass(slots=True)
class _Output(Generic[Value]):
    """An output and the ids of the sequences that hold it."""

    value: Value
    holders: set[str]


class EmbeddingCache(LedgerStore[str, _Output[Value]]):
    """Encoder outputs and their holders. Not thread-safe.

    bytes: bytes of all outputs.
    held_bytes: bytes of the held outputs.
    hits: holds of outputs that were in the cache.
    misses: outputs that had to be encoded.
    """

    def __init__(
        self,
        capacity: int,
        *,
        ttl_s: float | None = None,
        on_evict: Callable[[str, Value], None] | None = None,
        watch: Watch | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """capacity: ceiling in bytes.

        ttl_s: time to live in seconds; None: no bound.
        on_evict: called with key and value of every output that is removed for lack of room, unless it is
            stale. It must not block. It is not called for outputs that are cleared or expire.
        watch: called for every output that comes or goes, see `Ledger`.
        clock: seconds since the epoch.
        """
        self.hits = 0
        self.misses = 0
        self._on_evict = on_evict
        self._held = 0
        super().__init__(
            Ledger(
                capacity,
                ttl_s=ttl_s,
                clock=clock,
                is_pinned=lambda output: bool(output.holders),
                watch=watch,
            )
        )

    @property
    def held_bytes(self) -> int:
        return self._held

    @property
    def keys(self) -> list[str]:
        """The keys of all outputs, least recently used first."""
        return list(self._ledger)

    def __contains__(self, key: str) -> bool:
        return self._ledger.fresh(key) is not None

    def divide(self, owner_of: Callable[[str, object], str], share_of: Callable[[str], float]) -> None:
        """Bound the outputs of every owner by its share of the capacity; held outputs may exceed it.

        The arguments are those of `core.owners.Owners`.
        """
        self._ledger.divide(owner_of, share_of)

    def hold(self, key: str, holder: str, within: int | None = None) -> bool:
        """Keep an output for a sequence until it is released.

        within: bound on the held bytes; None: no bound.

        Returns False if the output is not in the cache and must be encoded, or if the bound would be
        exceeded.
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

        created: time when it was encoded; None: now.
        within: bound on the held bytes; None: no bound.

        Returns False if the bound would be exceeded.
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
        """Store an output of `size` bytes for the sequences that wait for it.

        created: time when it was encoded; None: now.
        """
        self.misses += 1
        self._store(key, value, size, holders, created)

    def keep(self, key: str, value: Value, size: int, created: float) -> None:
        """Store an output from which another one is made. No sequence waits for it, and it is not a miss.

        It becomes the most recently used output, even if it was in the cache already.
        """
        self._store(key, value, size, set(), created)

    def get(self, key: str) -> Value:
        """The value. Raises KeyError if it is not in the cache, which cannot happen to a held output."""
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
            self._keep_within_share(key)

    def drop(self, key: str) -> None:
        """Remove an output unless it is held."""
        output = self._ledger.get(key)
        if output is not None and not output.holders:
            self._ledger.remove(key)

    def clear(self) -> None:
        """Remove all outputs that are not held."""
        self._ledger.clear()

    def check_integrity(self, holders: set[str]) -> None:
        """Raise RuntimeError unless the bytes add up and every holder is one of `holders`."""
        self._ledger.check_integrity("the encoder-output cache")
        entries = [entry for key in self._ledger if (entry := self._ledger.entry(key)) is not None]
        held = sum(entry.size for entry in entries if entry.value.holders)
        if self._held != held:
            raise RuntimeError(
                f"the encoder-output cache: the count of held bytes is {self._held}, the entries have {held}"
            )
        unknown = {holder for entry in entries for holder in entry.value.holders} - holders
        if unknown:
            raise RuntimeError(f"encoder outputs are held by sequences that ended: {sorted(unknown)[:4]}")
        if not holders and self.bytes > self.capacity:
            raise RuntimeError(
                f"{self.bytes} bytes of encoder outputs are stored, and {self.capacity} are allowed"
            )

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
        self._keep_within_share(key)

    def _shrink(self) -> None:
        for key, entry in self._ledger.evict():
            if self._on_evict is not None and not self._ledger.is_stale(entry.created):
                self._on_evict(key, entry.value.value)

    def _keep_within_share(self, key: str) -> None:
        """Remove the oldest outputs of a key's owner. They go to no slower tier: it has shares of its own."""
        if key in self._ledger:
            self._ledger.evict_over_share(key)


@dataclass(slots=True)
class _Region(Generic[Value]):
    """An entry of the region cache.

    value: features of the region.
    relevance: accumulated relevance.
    used: number of its latest use; uses are counted over all regions.
    """

    value: Value
    relevance: float
    used: int


class RegionCache(LedgerStore[str, _Region[Value]]):
    """Regions by name. Values are opaque. Not thread-safe.

    A region is named by its pixels, the shape at which it was encoded and, if the tower depends on it,
    its place in the image. Its relevance is accumulated over the questions so far: the latest one counts
    in full, and every earlier one half as much as the next one. So regions that are relevant for many
    questions stay longest.
    """

    def __init__(
        self, capacity: int, *, ttl_s: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """capacity: ceiling in bytes. ttl_s: regions expire after so many seconds; None: never."""
        self.hits = 0
        self.misses = 0
        self._uses = 0
        super().__init__(
            Ledger(capacity, ttl_s=ttl_s, clock=clock, rank=lambda region: (region.relevance, region.used))
        )

    def __contains__(self, key: str) -> bool:
        return self.peek(key) is not None

    def get(self, key: str, relevance: float) -> Value | None:
        """The features, or None. relevance: the region's relevance for the current question, in [0, 1]."""
        self._ledger.expire()
        region = self._ledger.get(key)
        if region is None:
            self.misses += 1
            return None
        self.hits += 1
        self._uses += 1
        region.relevance, region.used = relevance + region.relevance / 2, self._uses
        return region.value

    def peek(self, key: str) -> Value | None:
        """The features, or None. This does not count as a use."""
        self._ledger.expire()
        region = self._ledger.get(key)
        return None if region is None else region.value

    def put(self, key: str, value: Value, size: int, relevance: float) -> None:
        """Store features of `size` bytes.

        The least relevant region is evicted first, which may be this one; among equally relevant regions, the
        least recently used one. Features larger than the ceiling are not stored, and no other region is
        evicted for them.

        relevance: the region's relevance for the current question, in [0, 1].
        """
        self._ledger.remove(key)
        if size > self.capacity:
            return
        self._uses += 1
        self._ledger.add(key, _Region(value, relevance, self._uses), size)
        self._ledger.expire()
        self._ledger.evict()

    def clear(self) -> None:
        self._ledger.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the bytes add up and are within the ceiling."""
        self._ledger.check_integrity("the region cache")
        if self.bytes > self.capacity:
            raise RuntimeError(f"{self.bytes} bytes of regions are stored, and {self.capacity} are allowed")


def owner_of_salt(salt: str) -> str:
    """Return the client that a cache salt belongs to."""
    return salt.partition(":")[0]


def owner_of_key(key: str, _: object = None) -> str:
    """Return the client that an entry belongs to, by the entry's key."""
    return owner_of_salt(key.partition("\x00")[0])


class CacheShares:
    """The shares of all clients that have less than the whole. Thread-safe.

    A request brings its client's share. The client is the first part of the request's cache salt, with
    which every key of these caches begins. Requests whose caches are not separated by client bring a
    share of 1.
    """

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}

    def note(self, salt: str, share: float) -> None:
        """Remember a client's share. salt: of its request. share: from 0 to 1."""
        owner = owner_of_salt(salt)
        if share < 1:
            self._shares[owner] = share
        else:
            self._shares.pop(owner, None)

    def share_of(self, owner: str) -> float:
        """Return the part of each cache that a client's entries may fill."""
        return self._shares.get(owner, 1.0)
