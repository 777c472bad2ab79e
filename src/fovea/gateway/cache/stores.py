"""Stores of answers: the form of their keys, the store in the memory of one worker, and memory in front of
Redis.

The memory is bounded in bytes and in age, with a share for each tenant. The store in Redis is in
`cache/redis.py`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fovea.core.ledger import Ledger

if TYPE_CHECKING:
    from fovea.gateway.cache.redis import RedisStore

ENTRY_BYTES = 1024
"""Estimated bytes of an entry beside its value: its key and its places in the ledger's tables."""


class ResponseStore(Protocol):
    """Bytes by key, each for a limited time. A store that fails behaves as an empty one and counts it."""

    async def get(self, key: str, *, owner: str = "") -> bytes | None:
        """Return the bytes of a key, or None if there are none.

        owner: tenant who reads them. A copy that the store makes counts as the tenant's.
        """
        ...

    async def put(self, key: str, value: bytes, ttl_s: float, *, owner: str = "") -> bool:
        """Store bytes for so many seconds. Returns whether they were stored.

        owner: tenant whose share of the store they fill.
        """
        ...

    async def clear(self) -> int:
        """Remove all answers. Returns how many were removed."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return the store's counts and sizes by name."""
        ...

    async def aclose(self) -> None:
        """Close connections. The store is not used afterwards."""
        ...


def store_key(scope: str, key: str) -> str:
    """Return the key of an answer in a store: 16 hex digits for its scope, a colon, and the request's key."""
    tag = hashlib.sha256(scope.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{tag}:{key}"


class _Value(NamedTuple):
    """The stored bytes, and the tenant whose share they fill."""

    data: bytes
    owner: str


class MemoryStore:
    """Answers in memory, the least recently used ones evicted first. For one event loop.

    A tenant over its share loses its own oldest answers first, also while there is room.
    """

    def __init__(
        self, capacity: int, *, ttl_s: float, share: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """capacity: ceiling in bytes, each entry with ENTRY_BYTES.

        ttl_s: longest time of an entry in seconds.
        share: part of the capacity that the answers of one tenant may fill.
        clock: seconds; it never goes back.
        """
        self._ttl_s = ttl_s
        self._clock = clock
        self._ledger: Ledger[str, _Value] = Ledger(capacity, ttl_s=ttl_s, clock=clock)
        self._ledger.divide(lambda key, value: value.owner, lambda owner: share)

    async def get(self, key: str, *, owner: str = "") -> bytes | None:
        """Return the bytes of a key and mark them as the most recently used; None if there are none."""
        value = self._ledger.fresh(key)
        if value is None:
            return None
        self._ledger.touch(key)
        return value.data

    async def put(self, key: str, value: bytes, ttl_s: float, *, owner: str = "") -> bool:
        """Store bytes. False: they are larger than the tenant's share."""
        entry, size = _Value(value, owner), len(value) + ENTRY_BYTES
        self._ledger.remove(key)
        self._ledger.expire()
        if size > self._ledger.capacity or not self._ledger.fits_share(key, entry, size):
            return False
        # The ledger has one time for all entries. An entry with less of it counts as older.
        created = self._clock() + min(ttl_s, self._ttl_s) - self._ttl_s
        self._ledger.add(key, entry, size, created)
        self._ledger.evict_over_share(key)
        self._ledger.evict()
        return True

    async def clear(self) -> int:
        """Remove all answers. Returns how many were removed."""
        number = len(self._ledger)
        self._ledger.clear()
        return number

    def stats(self) -> Mapping[str, float]:
        """Return the store's counts and sizes by name."""
        self._ledger.expire()
        return {
            "memory_bytes": self._ledger.bytes,
            "memory_capacity_bytes": self._ledger.capacity,
            "memory_entries": len(self._ledger),
            "memory_evictions": self._ledger.evictions,
            "memory_expired": self._ledger.expirations,
        }

    async def aclose(self) -> None:
        """Remove everything."""
        self._ledger.clear()


@dataclass(eq=False)
class LayeredStore:
    """Looks into memory first, then into Redis. What Redis has is copied into memory.

    near_ttl_s: longest time of a copy in seconds. After `clear`, other workers find their copies for so long.
    """

    near: MemoryStore
    far: RedisStore
    near_ttl_s: float

    async def get(self, key: str, *, owner: str = "") -> bytes | None:
        """Return the bytes of a key, or None if neither store has them."""
        value = await self.near.get(key)
        if value is not None:
            return value
        found = await self.far.fetch(key)
        if found is None:
            return None
        await self.near.put(key, found.value, min(found.ttl_s, self.near_ttl_s), owner=owner)
        return found.value

    async def put(self, key: str, value: bytes, ttl_s: float, *, owner: str = "") -> bool:
        """Store bytes in both. The memory has them before this waits for Redis."""
        near = await self.near.put(key, value, min(ttl_s, self.near_ttl_s), owner=owner)
        far = await self.far.put(key, value, ttl_s)
        return near or far

    async def clear(self) -> int:
        """Remove all answers. Returns how many Redis had."""
        await self.near.clear()
        return await self.far.clear()

    def stats(self) -> Mapping[str, float]:
        """Return the counts and sizes of both by name."""
        return {**self.near.stats(), **self.far.stats()}

    async def aclose(self) -> None:
        """Close both."""
        await self.near.aclose()
        await self.far.aclose()
