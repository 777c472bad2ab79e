"""The tiers of encoder outputs below the device's memory: host memory, then disk.

    add_encoded(key, features)    after encoding: the disk tier stores a copy, which outlives the process
    add_evicted(key, features)    after eviction from device memory: the host tier stores a copy
    get(key, rows)                while a request is prepared: a copy from the fastest tier that has it

The first two only enqueue and never wait, so the engine's thread may call them. One thread per tier makes the
copies. `find` and `get` also find outputs that are still in a queue. `get` copies, so only worker threads may
call it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from fovea.engine.cache.shares import CacheShares, owner_of_key
from fovea.engine.cache.write_queue import WriteQueue
from fovea.engine.config import MIB, OutputSettings
from fovea.engine.tiers.disk import DiskTier
from fovea.engine.tiers.host import HostTier
from fovea.engine.tiers.link import HostLink
from fovea.engine.vision.features import VisualFeatures

QUEUE_BYTES = 128 << 20
"""Limit of the bytes that wait to be copied to a tier.

On CUDA they are device memory above the ceiling of the device's cache, until they are copied.
"""
SWEEP_S = 60.0
"""Seconds of an idle queue after which its tier removes expired outputs."""
CLOSE_S = 10.0
"""Seconds that closing waits for the queue of each tier."""


class FeatureTier(Protocol):
    """One kind of slower memory. When `put` returns, the copy is complete and device memory may be reused."""

    name: str

    def __contains__(self, key: str) -> bool: ...

    def get(self, key: str) -> VisualFeatures | None: ...

    def put(self, key: str, features: VisualFeatures) -> None: ...

    def drop(self, key: str) -> None: ...

    def clear(self) -> None: ...

    def sweep(self) -> None:
        """Remove expired outputs."""
        ...

    def flush(self, timeout: float) -> bool: ...

    def close(self) -> None: ...

    def check_integrity(self) -> None: ...

    def stats(self) -> dict[str, float]: ...


class _QueuedTier:
    """A tier and the queue of outputs to copy to it."""

    def __init__(self, tier: FeatureTier) -> None:
        self.tier = tier
        self.queue: WriteQueue[VisualFeatures] = WriteQueue(
            tier.put, tier.sweep, name=f"fovea-to-{tier.name}", limit=QUEUE_BYTES, every_s=SWEEP_S
        )

    def __contains__(self, key: str) -> bool:
        return self.queue.pending_value(key) is not None or key in self.tier

    def get(self, key: str) -> VisualFeatures | None:
        waiting = self.queue.pending_value(key)
        return self.tier.get(key) if waiting is None else waiting


class SlowerTiers:
    """The host tier and the disk tier, with their queues. Thread-safe.

    host: stores the outputs that the device evicts; None: there is no such tier.
    disk: stores the outputs that the encoder computes; None: there is no such tier.
    ttl_s: outputs that were encoded longer ago are misses in every tier; None: no limit.
    """

    def __init__(
        self, host: FeatureTier | None = None, disk: FeatureTier | None = None, ttl_s: float | None = None
    ) -> None:
        self._host = None if host is None else _QueuedTier(host)
        self._disk = None if disk is None else _QueuedTier(disk)
        self._tiers = tuple(tier for tier in (self._host, self._disk) if tier is not None)
        self._ttl_s = ttl_s
        self._counting = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add_encoded(self, key: str, features: VisualFeatures) -> None:
        self._submit(self._disk, key, features)

    def add_evicted(self, key: str, features: VisualFeatures) -> None:
        self._submit(self._host, key, features)

    def find(self, keys: Iterable[str]) -> frozenset[str]:
        """Return those of the keys that any tier has, and count misses. For worker threads.

        keys: outputs that a request needs.
        """
        known = set()
        for key in keys:
            for tier in self._tiers:
                if key in tier:
                    known.add(key)
                    break
                self._count(tier, "misses")
        return frozenset(known)

    def get(self, key: str, rows: int) -> VisualFeatures | None:
        """Return an output, or None. If it has not that number of rows, it is a miss."""
        for tier in self._tiers:
            features = tier.get(key)
            if features is not None and features.embeds.shape[0] == rows and not self._is_stale(features):
                return features
        return None

    def drop(self, key: str) -> None:
        """Remove an output from all tiers."""
        for tier in self._tiers:
            tier.queue.cancel(key)
            tier.tier.drop(key)

    def clear(self, *names: str) -> None:
        """Remove all outputs from the tiers of these names."""
        for tier in self._tiers:
            if tier.tier.name in names:
                tier.queue.cancel_all()
                tier.tier.clear()

    def flush(self, timeout: float) -> bool:
        """Wait until all queues are empty and all outputs are stored. `timeout`: seconds for each wait.

        Returns False if that takes longer.
        """
        return all(tier.queue.flush(timeout) and tier.tier.flush(timeout) for tier in self._tiers)

    def close(self) -> None:
        """Write what is still in the queues, as far as CLOSE_S allows, and stop the threads."""
        for tier in self._tiers:
            tier.queue.close(CLOSE_S)
            tier.tier.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError if the bytes of a tier do not add up."""
        for tier in self._tiers:
            tier.tier.check_integrity()

    def stats(self) -> dict[str, float]:
        """Return all counters by the names that `observe.metrics` uses, such as embed_host_bytes."""
        counters: dict[str, float] = {}
        for tier in self._tiers:
            values = tier.tier.stats()
            for name in ("misses", "dropped"):
                values[name] += self._counts[tier.tier.name, name]
            values["leaving_bytes"] = tier.queue.bytes
            counters |= {f"embed_{tier.tier.name}_{name}": value for name, value in values.items()}
        return counters

    def _submit(self, tier: _QueuedTier | None, key: str, features: VisualFeatures) -> None:
        if tier is not None and not tier.queue.submit(key, features):
            self._count(tier, "dropped")

    def _count(self, tier: _QueuedTier, name: str) -> None:
        with self._counting:
            self._counts[tier.tier.name, name] += 1

    def _is_stale(self, features: VisualFeatures) -> bool:
        return self._ttl_s is not None and time.time() - features.created_at >= self._ttl_s


def slower_tiers(
    settings: OutputSettings, fingerprint: str, device: torch.device, shares: CacheShares | None = None
) -> SlowerTiers:
    """Build the tiers that the configuration enables.

    fingerprint: as for `DiskTier`.
    shares: bound what each client may fill of the host tier; None: nobody is bound.
    """
    link, ttl = HostLink(device), settings.embed_ttl_s or None
    host = HostTier(settings.embed_host_mib * MIB, link, ttl) if settings.embed_host_mib else None
    if host is not None and shares is not None:
        host.divide(owner_of_key, shares.share_of)
    disk = None
    if settings.embed_disk_dir:
        folder, capacity = Path(settings.embed_disk_dir), settings.embed_disk_mib * MIB
        disk = DiskTier(folder, capacity, fingerprint, link, ttl)
    return SlowerTiers(host, disk, ttl)
