"""The account of a byte-bounded store: its entries, their sizes and ages, and which one is evicted next.

These stores in memory use a ledger: encoder outputs on the device and in host memory, encoded regions,
processed pixels, uploads, downloads, decoded images. Each store implements its own additions: holds, locks,
tenants. If the entries of a store are divided among owners, `Owners` counts the bytes of each.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Entry(Generic[V]):
    """One entry.

    size: bytes.
    created: time of its creation, in seconds of the ledger's clock. It is before the time of `add` if the
        value was created elsewhere.
    """

    value: V
    size: int
    created: float


class Ledger(Generic[K, V]):
    """Entries in order of use, the least recently used first.

    Not thread-safe; the store must lock if threads share it.

    capacity: ceiling in bytes. `add` does not enforce it; the store calls `evict`.
    bytes: bytes of all entries, and reserved bytes.
    evictions: entries removed for lack of room.
    expirations: entries removed because of their age.
    """

    def __init__(
        self,
        capacity: int,
        *,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_pinned: Callable[[V], bool] = lambda value: False,
        rank: Callable[[V], Any] | None = None,
        watch: Callable[[K, int | None], None] | None = None,
    ) -> None:
        """ttl_s: an entry is stale this many seconds after its creation; None: never.

        is_pinned: whether an entry with this value must stay, even if it is stale or the ceiling is exceeded.
        rank: the entry of the lowest rank is evicted first; None: the least recently used one is.
        watch: called with the key and the size of every entry that is added, with None for a size when it is
            removed. It must not block.
        """
        self.capacity = capacity
        self.ttl_s = ttl_s
        self.bytes = 0
        self.evictions = 0
        self.expirations = 0
        self._clock = clock
        self._is_pinned = is_pinned
        self._rank = rank
        self._watch = watch
        self._reserved = 0
        self._owners: Owners[K, V] | None = None
        self._entries: OrderedDict[K, Entry[V]] = OrderedDict()
        # Heap of (created, number, key). Items of replaced or removed entries stay in it until they are
        # compacted.
        self._ages: list[tuple[float, int, K]] = []
        self._numbers = itertools.count()

    def divide(self, owner_of: Callable[[K, V], str], share_of: Callable[[str], float]) -> None:
        """Give every entry an owner, for `evict_over_share`. The arguments are those of `Owners`."""
        self._owners = Owners(owner_of, share_of)
        for key, entry in self._entries.items():
            self._owners.add(key, entry.value, entry.size)

    def fits_share(self, key: K, value: V, size: int) -> bool:
        """Whether an entry alone is within its owner's share."""
        return self._owners is None or size <= self._owners.allowed(key, value, self.capacity)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """The keys, least recently used first. Entries may be removed during the iteration."""
        return iter(list(self._entries))

    def __contains__(self, key: K) -> bool:
        """Whether there is an entry, stale or not."""
        return key in self._entries

    def get(self, key: K) -> V | None:
        """The value, stale or not, or None. The order of use does not change."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def entry(self, key: K) -> Entry[V] | None:
        """The entry, stale or not, or None. The order of use does not change."""
        return self._entries.get(key)

    def fresh(self, key: K) -> V | None:
        """The value, or None if there is none or it is stale. The order of use does not change."""
        entry = self._entries.get(key)
        return None if entry is None or self.is_stale(entry.created) else entry.value

    def is_stale(self, created: float) -> bool:
        """Whether an entry that was created at this time is stale."""
        return self.ttl_s is not None and self._clock() - created >= self.ttl_s

    def add(self, key: K, value: V, size: int, created: float | None = None) -> None:
        """Add an entry as the most recently used one.

        It replaces an entry of the same key. created: None: now.
        """
        self.remove(key)
        created = self._clock() if created is None else created
        self._entries[key] = Entry(value, size, created)
        self.bytes += size
        if self._owners is not None:
            self._owners.add(key, value, size)
        if self.ttl_s is not None:
            heapq.heappush(self._ages, (created, next(self._numbers), key))
        if self._watch is not None:
            self._watch(key, size)

    def touch(self, key: K) -> None:
        """Make an entry the most recently used one. Raises KeyError if there is none."""
        self._entries.move_to_end(key)
        if self._owners is not None:
            self._owners.touch(key, self._entries[key].value)

    def remove(self, key: K) -> Entry[V] | None:
        """Remove an entry, pinned or not. Returns it, or None if there was none."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry.size
            if self._owners is not None:
                self._owners.remove(key, entry.value)
            if len(self._ages) > 64 + 2 * len(self._entries):
                self._compact()
            if self._watch is not None:
                self._watch(key, None)
        return entry

    def clear(self) -> None:
        """Remove all entries that are not pinned."""
        for key in self:
            if not self._is_pinned(self._entries[key].value):
                self.remove(key)

    def reserve(self, size: int) -> None:
        """Count the bytes of an entry that is still being created."""
        self._reserved += size
        self.bytes += size

    def unreserve(self, size: int) -> None:
        """Undo `reserve`."""
        self._reserved -= size
        self.bytes -= size

    def expire(self) -> list[K]:
        """Remove the stale entries that are not pinned. Returns their keys."""
        removed: list[K] = []
        pinned = []
        while self._ages and self.is_stale(self._ages[0][0]):
            item = heapq.heappop(self._ages)
            entry = self._entries.get(item[2])
            if entry is None or entry.created != item[0]:
                continue
            if self._is_pinned(entry.value):
                pinned.append(item)
                continue
            self.remove(item[2])
            self.expirations += 1
            removed.append(item[2])
        for item in pinned:
            heapq.heappush(self._ages, item)
        return removed

    def evict(self, room: int | None = None) -> list[tuple[K, Entry[V]]]:
        """Remove entries that are not pinned until the bytes are within `room`, or no such entry is left.

        room: bytes; None: the capacity.

        Returns the removed entries, in the order of their removal.
        """
        excess = self.bytes - (self.capacity if room is None else room)
        victims = []
        for key, entry in self._eviction_order() if excess > 0 else ():
            if excess <= 0:
                break
            if not self._is_pinned(entry.value):
                victims.append((key, entry))
                excess -= entry.size
        for key, _ in victims:
            self.remove(key)
        self.evictions += len(victims)
        return victims

    def evict_over_share(self, key: K) -> None:
        """Remove the oldest entries of an entry's owner, except pinned ones, until it is within its share."""
        if self._owners is None:
            return
        value = self._entries[key].value
        victims = self._owners.victims(
            key, value, self.capacity, lambda other: self._is_pinned(self._entries[other].value)
        )
        for victim in victims:
            self.remove(victim)
        self.evictions += len(victims)

    def check_integrity(self, name: str) -> None:
        """Raise RuntimeError unless the bytes add up. name: the store's name, for the message."""
        total = self._reserved + sum(entry.size for entry in self._entries.values())
        if self.bytes != total:
            raise RuntimeError(f"{name}: the byte count is {self.bytes}, the entries have {total}")

    def _eviction_order(self) -> Iterator[tuple[K, Entry[V]]]:
        """Entries in the order of their eviction. No entry may be removed during the iteration."""
        if self._rank is None:
            yield from self._entries.items()
            return
        order = [
            (self._rank(entry.value), number, key)
            for number, (key, entry) in enumerate(self._entries.items())
        ]
        heapq.heapify(order)
        while order:
            key = heapq.heappop(order)[2]
            yield key, self._entries[key]

    def _compact(self) -> None:
        """Remove the items of the heap whose entries were replaced or removed."""
        alive = [
            (created, number, key) for created, number, key in self._ages if self._is_alive(key, created)
        ]
        heapq.heapify(alive)
        self._ages = alive

    def _is_alive(self, key: K, created: float) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.created == created


class LedgerStore(Generic[K, V]):
    """A base of stores that one thread uses: the sizes and counts of their ledger, to read.

    A store with a lock has no such base, because it must take the lock to read them.
    """

    def __init__(self, ledger: Ledger[K, V]) -> None:
        self._ledger = ledger

    @property
    def capacity(self) -> int:
        """Ceiling in bytes."""
        return self._ledger.capacity

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return self._ledger.bytes

    @property
    def evictions(self) -> int:
        """Entries removed for lack of room."""
        return self._ledger.evictions

    @property
    def expirations(self) -> int:
        """Entries removed because of their age."""
        return self._ledger.expirations

    def __len__(self) -> int:
        return len(self._ledger)


class Owners(Generic[K, V]):
    """The entries of every owner. An owner without entries is not remembered.

    owner_of: returns the owner of an entry by its key and value.
    share_of: returns the part of the capacity that an owner's entries may fill, from 0 to 1. It may change.
    """

    def __init__(self, owner_of: Callable[[K, V], str], share_of: Callable[[str], float]) -> None:
        self.owner_of = owner_of
        self.share_of = share_of
        self._sizes: dict[str, OrderedDict[K, int]] = {}
        self._bytes: dict[str, int] = {}

    def bytes_of(self, owner: str) -> int:
        """Bytes of an owner's entries."""
        return self._bytes.get(owner, 0)

    def allowed(self, key: K, value: V, capacity: int) -> int:
        """Bytes that the entries of an entry's owner may have in a ledger of this capacity."""
        return int(self.share_of(self.owner_of(key, value)) * capacity)

    def victims(self, key: K, value: V, capacity: int, is_pinned: Callable[[K], bool]) -> list[K]:
        """Return the entries to remove until the owner of an entry is within its share, the oldest first."""
        owner = self.owner_of(key, value)
        excess = self.bytes_of(owner) - self.allowed(key, value, capacity)
        victims: list[K] = []
        for other, size in self._sizes.get(owner, {}).items() if excess > 0 else ():
            if excess <= 0:
                break
            if not is_pinned(other):
                victims.append(other)
                excess -= size
        return victims

    def add(self, key: K, value: V, size: int) -> None:
        """Add an entry as the most recently used one of its owner."""
        owner = self.owner_of(key, value)
        self._sizes.setdefault(owner, OrderedDict())[key] = size
        self._bytes[owner] = self._bytes.get(owner, 0) + size

    def touch(self, key: K, value: V) -> None:
        """Make an entry the most recently used one of its owner."""
        self._sizes[self.owner_of(key, value)].move_to_end(key)

    def remove(self, key: K, value: V) -> None:
        """Remove an entry."""
        owner = self.owner_of(key, value)
        sizes = self._sizes[owner]
        self._bytes[owner] -= sizes.pop(key)
        if not sizes:
            del self._sizes[owner], self._bytes[owner]
