"""A small store in each worker's memory, in front of one that all workers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fovea.gateway.cache.memory import MemoryStore

if TYPE_CHECKING:
    from fovea.gateway.cache.redis import RedisStore


class LayeredStore:
    """Looks into memory first, then into Redis. What Redis has is copied into memory.

    near_ttl_s: longest time of a copy in seconds. After `clear`, other workers find their copies for so long.
    """

    def __init__(self, near: MemoryStore, far: RedisStore, near_ttl_s: float) -> None:
        self._near = near
        self._far = far
        self._near_ttl_s = near_ttl_s

    async def get(self, key: str, *, owner: str = "") -> bytes | None:
        """Return the bytes of a key, or None if neither store has them."""
        value = self._near.find(key)
        if value is not None:
            return value
        found = await self._far.fetch(key)
        if found is None:
            return None
        self._near.store(key, found.value, min(found.ttl_s, self._near_ttl_s), owner=owner)
        return found.value

    async def put(self, key: str, value: bytes, ttl_s: float, *, owner: str = "") -> bool:
        """Store bytes in both. The memory has them before this waits for Redis."""
        near = self._near.store(key, value, min(ttl_s, self._near_ttl_s), owner=owner)
        far = await self._far.put(key, value, ttl_s, owner=owner)
        return near or far

    async def drop(self, key: str) -> None:
        """Remove a key from both."""
        await self._near.drop(key)
        await self._far.drop(key)

    async def clear(self, scope: str | None = None) -> int:
        """Remove the answers of a scope; None: of all scopes. Returns how many Redis had."""
        await self._near.clear(scope)
        return await self._far.clear(scope)

    def stats(self) -> Mapping[str, float]:
        """Return the counts and sizes of both by name."""
        return {**self._near.stats(), **self._far.stats()}

    async def aclose(self) -> None:
        """Close both."""
        await self._near.aclose()
        await self._far.aclose()
