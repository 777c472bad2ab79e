"""Encoder outputs in host memory: what the device had no room for, a copy away instead of an encoder's run."""

from __future__ import annotations

from fovea.engine.cache.host import HostStore
from fovea.engine.tiers.link import HostLink
from fovea.engine.vision.features import VisualFeatures


class HostTier:
    """A `HostStore` of features. Both ways are copies, so `get` and `put` belong into worker threads."""

    name = "host"

    def __init__(self, capacity: int, link: HostLink, ttl_s: float | None = None) -> None:
        self._store: HostStore[VisualFeatures] = HostStore(capacity, ttl_s=ttl_s)
        self._link = link

    def __contains__(self, key: str) -> bool:
        return key in self._store

    def get(self, key: str) -> VisualFeatures | None:
        found = self._store.get(key)
        return None if found is None else self._link.to_device(found)

    def put(self, key: str, features: VisualFeatures) -> None:
        self._store.put(key, features.nbytes, features.created_at, lambda: self._link.to_host(features))

    def drop(self, key: str) -> None:
        self._store.drop(key)

    def clear(self) -> None:
        self._store.clear()

    def sweep(self) -> None:
        self._store.sweep()

    def flush(self, timeout: float) -> bool:
        """What was put is here already."""
        return True

    def close(self) -> None:
        """Nothing outlives the process."""

    def check_integrity(self) -> None:
        self._store.check_integrity()

    def stats(self) -> dict[str, float]:
        found = self._store.stats()
        return {
            "bytes": found.bytes,
            "capacity_bytes": self._store.capacity,
            "entries": found.entries,
            "hits": found.hits,
            "misses": found.misses,
            "dropped": found.dropped,
            "evictions": found.evictions,
            "expired": found.expired,
        }
