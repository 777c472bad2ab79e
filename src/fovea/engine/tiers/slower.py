"""Encoder outputs below the device's memory: host memory, then disk, behind one door.

    made(key, features)       the encoder has made them: tiers that outlive the process take a copy
    evicted(key, features)    the device has no room for them any more: host memory takes a copy
    get(key, tokens)          a request is being prepared and wants them: the fastest tier that has them answers

The first two only queue and never wait, so they are for the engine's thread; copies are made by a thread per tier. What
waits in a queue is found. `get` copies, so it is for worker threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from fovea.engine.cache.write_queue import WriteQueue
from fovea.engine.config import MIB, OutputSettings
from fovea.engine.tiers.disk import DiskTier
from fovea.engine.tiers.host import HostTier
from fovea.engine.tiers.link import HostLink
from fovea.engine.vision.features import VisualFeatures

QUEUE_BYTES = 128 << 20
"""What may wait to be copied to a tier; on CUDA that is memory of the device beyond its ceiling, for that moment."""
SWEEP_S = 60.0
CLOSE_S = 10.0


class FeatureTier(Protocol):
    """One kind of slower memory. `put` returns when nothing of the device's memory is needed any more."""

    name: str

    def __contains__(self, key: str) -> bool: ...

    def get(self, key: str) -> VisualFeatures | None: ...

    def put(self, key: str, features: VisualFeatures) -> None: ...

    def drop(self, key: str) -> None: ...

    def clear(self) -> None: ...

    def sweep(self) -> None:
        """Remove what is too old."""
        ...

    def flush(self, timeout: float) -> bool: ...

    def close(self) -> None: ...

    def check_integrity(self) -> None: ...

    def stats(self) -> dict[str, float]: ...


class _Behind:
    """A tier and what waits to be copied there."""

    def __init__(self, tier: FeatureTier) -> None:
        self.tier = tier
        self.queue: WriteQueue[VisualFeatures] = WriteQueue(
            tier.put, tier.sweep, name=f"fovea-to-{tier.name}", limit=QUEUE_BYTES, every_s=SWEEP_S
        )

    def __contains__(self, key: str) -> bool:
        return self.queue.pending(key) is not None or key in self.tier

    def get(self, key: str) -> VisualFeatures | None:
        waiting = self.queue.pending(key)
        return self.tier.get(key) if waiting is None else waiting


class SlowerTiers:
    """host takes what the device evicts, disk what the encoder makes; either may be None. Thread-safe.

    ttl_s: outputs encoded that long ago are misses, wherever they are.
    """

    def __init__(
        self, host: FeatureTier | None = None, disk: FeatureTier | None = None, ttl_s: float | None = None
    ) -> None:
        self._host = None if host is None else _Behind(host)
        self._disk = None if disk is None else _Behind(disk)
        self._tiers = tuple(tier for tier in (self._host, self._disk) if tier is not None)
        self._ttl_s = ttl_s
        self._counting = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add_encoded(self, key: str, features: VisualFeatures) -> None:
        self._submit(self._disk, key, features)

    def add_evicted(self, key: str, features: VisualFeatures) -> None:
        self._submit(self._host, key, features)

    def find(self, keys: Iterable[str]) -> frozenset[str]:
        """Which of these outputs, all of which somebody needs, are in any of the tiers. For worker threads."""
        found = set()
        for key in keys:
            for behind in self._tiers:
                if key in behind:
                    found.add(key)
                    break
                self._count(behind, "misses")
        return frozenset(found)

    def get(self, key: str, tokens: int) -> VisualFeatures | None:
        """An output of so many visual tokens. One that is not what the plan says is a miss."""
        for behind in self._tiers:
            features = behind.get(key)
            if features is not None and features.embeds.shape[0] == tokens and not self._is_stale(features):
                return features
        return None

    def drop(self, key: str) -> None:
        """Lose an output on purpose."""
        for behind in self._tiers:
            behind.queue.cancel(key)
            behind.tier.drop(key)

    def clear(self, *names: str) -> None:
        """Forget what the tiers of these names hold."""
        for behind in self._tiers:
            if behind.tier.name in names:
                behind.queue.cancel_all()
                behind.tier.clear()

    def flush(self, timeout: float) -> bool:
        """Wait until what was put is where it belongs; False: it took longer."""
        return all(behind.queue.flush(timeout) and behind.tier.flush(timeout) for behind in self._tiers)

    def close(self) -> None:
        for behind in self._tiers:
            behind.queue.close(CLOSE_S)
            behind.tier.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless each tier's bytes add up."""
        for behind in self._tiers:
            behind.tier.check_integrity()

    def stats(self) -> dict[str, float]:
        """By the names of `observe.metrics`: embed_host_bytes and so on."""
        found: dict[str, float] = {}
        for behind in self._tiers:
            values = behind.tier.stats()
            for name in ("misses", "dropped"):
                values[name] += self._counts[behind.tier.name, name]
            values["leaving_bytes"] = behind.queue.bytes
            found |= {f"embed_{behind.tier.name}_{name}": value for name, value in values.items()}
        return found

    def _submit(self, behind: _Behind | None, key: str, features: VisualFeatures) -> None:
        if behind is not None and not behind.queue.submit(key, features):
            self._count(behind, "dropped")

    def _count(self, behind: _Behind, name: str) -> None:
        with self._counting:
            self._counts[behind.tier.name, name] += 1

    def _is_stale(self, features: VisualFeatures) -> bool:
        return self._ttl_s is not None and time.time() - features.created_at >= self._ttl_s


def slower_tiers(settings: OutputSettings, fingerprint: str, device: torch.device) -> SlowerTiers:
    """The tiers that the configuration asks for. fingerprint: as `DiskTier` has it."""
    link, ttl = HostLink(device), settings.embed_ttl_s or None
    host = HostTier(settings.embed_host_mib * MIB, link, ttl) if settings.embed_host_mib else None
    disk = None
    if settings.embed_disk_dir:
        folder, capacity = Path(settings.embed_disk_dir), settings.embed_disk_mib * MIB
        disk = DiskTier(folder, capacity, fingerprint, link, ttl)
    return SlowerTiers(host, disk, ttl)
