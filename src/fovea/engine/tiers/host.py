"""The host tier of encoder outputs: outputs evicted from the device are copied back, not encoded again."""

from __future__ import annotations

from collections.abc import Callable

from fovea.engine.cache.host import HostStore
from fovea.engine.tiers.link import HostLink
from fovea.engine.vision.features import VisualFeatures


class HostTier:
    """Encoder outputs in a `HostStore`. Call `get` and `put` from worker threads: both copy.

    capacity: limit in bytes.
    link: copies features between host and device.
    ttl_s: seconds after which an output expires; None: never.
    """

    name = "host"

    def __init__(self, capacity: int, link: HostLink, ttl_s: float | None = None) -> None:
        self._store: HostStore[VisualFeatures] = HostStore(capacity, ttl_s=ttl_s)
        self._link = link

    def divide(self, owner_of: Callable[[str, object], str], share_of: Callable[[str], float]) -> None:
        """Bound every owner's outputs, see `HostStore.divide`."""
        self._store.divide(owner_of, share_of)

    def __contains__(self, key: str) -> bool:
        return key in self._store

    def get(self, key: str) -> VisualFeatures | None:
        features = self._store.get(key)
        return None if features is None else self._link.to_device(features)

    def put(self, key: str, features: VisualFeatures) -> None:
        self._store.put(key, features.nbytes, features.created_at, lambda: self._link.to_host(features))

    def drop(self, key: str) -> None:
        self._store.drop(key)

    def clear(self) -> None:
        self._store.clear()

    def sweep(self) -> None:
        self._store.sweep()

    def flush(self, timeout: float) -> bool:
        """Return at once: `put` returns after the copy."""
        return True

    def close(self) -> None:
        """Do nothing: the memory is freed with the process."""

    def check_integrity(self) -> None:
        self._store.check_integrity()

    def stats(self) -> dict[str, float]:
        stats = self._store.stats()
        return {
            "bytes": stats.bytes,
            "capacity_bytes": self._store.capacity,
            "entries": stats.entries,
            "hits": stats.hits,
            "misses": stats.misses,
            "dropped": stats.drops,
            "evictions": stats.evictions,
            "expired": stats.expirations,
        }
