"""Tiers of encoder outputs below the device's memory: host memory, then disk.

    add_encoded(key, features)    after encoding: the disk tier stores a copy, which outlives the process
    add_evicted(key, features)    after eviction from device memory: the host tier stores a copy
    get(key, rows)                while a request is prepared: a copy from the fastest tier that has it

The first two only enqueue and never wait, so the engine's thread may call them. One thread per tier makes the
copies. `find` and `get` also find outputs that are still in a queue. `get` copies, so only worker threads may
call it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from fovea import __version__
from fovea.engine.cache.disk import DiskStore
from fovea.engine.cache.disk_files import Array, Arrays
from fovea.engine.cache.embeddings import CacheShares, Watch, owner_of_key
from fovea.engine.cache.host import HostStore, WriteQueue
from fovea.engine.config import MIB
from fovea.engine.config.memory import OutputSettings
from fovea.engine.vision.encoding import VisualFeatures
from fovea.kernels.codes import Codes

STAGING_BYTES = 16 << 20
"""Size of the pinned buffer."""
QUEUE_BYTES = 128 << 20
"""Limit of the bytes that wait to be copied to a tier.

On CUDA they are device memory above the ceiling of the device's cache, until they are copied.
"""
SWEEP_S = 60.0
"""Seconds of an idle queue after which its tier removes expired outputs."""
CLOSE_S = 10.0
"""Seconds that closing waits for the queue of each tier."""


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
    settings: OutputSettings,
    fingerprint: str,
    device: torch.device,
    shares: CacheShares | None = None,
    watch: Watch | None = None,
) -> SlowerTiers:
    """Build the tiers that the configuration enables.

    fingerprint: as for `DiskTier`.
    shares: bound what each client may fill of the host tier; None: nobody is bound.
    watch: called for every output that comes to the host tier or goes, see `Ledger`.
    """
    link, ttl = HostLink(device), settings.embed_ttl_s or None
    host = HostTier(settings.embed_host_mib * MIB, link, ttl, watch) if settings.embed_host_mib else None
    if host is not None and shares is not None:
        host.divide(owner_of_key, shares.share_of)
    disk = None
    if settings.embed_disk_dir:
        folder, capacity = Path(settings.embed_disk_dir), settings.embed_disk_mib * MIB
        disk = DiskTier(folder, capacity, fingerprint, link, ttl)
    return SlowerTiers(host, disk, ttl)


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


class HostLink:
    """Copies features to host memory and back. Thread-safe; makes one copy at a time.

    On CUDA, bytes pass through a small pinned buffer in a stream of their own, so the engine's stream
    never waits for them. The calling thread does wait, so it must not be the engine's thread. In host
    memory, features are stored in plain memory: pinned memory is allocated in powers of two, so a limit
    in bytes would not hold. On a CPU the same two copies are made.

    device: the device whose features are copied.
    staging_bytes: size of the pinned buffer.
    """

    def __init__(self, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._size = staging_bytes
        self._staging: Tensor | None = None
        self._lock = threading.Lock()

    def to_host(self, features: VisualFeatures) -> VisualFeatures:
        """Return a copy in host memory, complete when this returns."""
        return self._copy(features, lambda tensor: torch.empty_like(tensor, device="cpu"))

    def to_device(self, features: VisualFeatures) -> VisualFeatures:
        """Return a copy on the device, complete when this returns."""
        copy = self._copy(features, lambda tensor: torch.empty_like(tensor, device=self._device))
        if self._stream is not None:
            for tensor in copy.tensors:
                tensor.record_stream(torch.cuda.default_stream(self._device))
        return copy

    @torch.inference_mode()
    def _copy(self, features: VisualFeatures, empty: Callable[[Tensor], Tensor]) -> VisualFeatures:
        with self._lock, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            copies = []
            for tensor in features.tensors:
                source = tensor.contiguous()
                copies.append(empty(source))
                self._copy_bytes(_flat(source), _flat(copies[-1]))
        return VisualFeatures.from_tensors(copies, features.created_at)

    def _copy_bytes(self, source: Tensor, target: Tensor) -> None:
        """Copy flat bytes through the buffer. Source or target, or both, may be on the device."""
        if self._staging is None:
            self._staging = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._cuda)
        for start in range(0, len(source), self._size):
            section = slice(start, min(len(source), start + self._size))
            buffer = self._staging[: section.stop - section.start]
            buffer.copy_(source[section], non_blocking=True)
            self._finish()
            target[section].copy_(buffer, non_blocking=True)
            self._finish()

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class HostTier:
    """Encoder outputs in a `HostStore`. Call `get` and `put` from worker threads: both copy.

    capacity: limit in bytes.
    link: copies features between host and device.
    ttl_s: seconds after which an output expires; None: never.
    watch: called for every output that comes or goes, see `Ledger`.
    """

    name = "host"

    def __init__(
        self, capacity: int, link: HostLink, ttl_s: float | None = None, watch: Watch | None = None
    ) -> None:
        self._store: HostStore[VisualFeatures] = HostStore(capacity, ttl_s=ttl_s, watch=watch)
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


class DiskTier:
    """Encoder outputs in a `DiskStore`.

    Call `get` and `put` from worker threads: they read files, and may wait for the device.

    folder: folder of the store. Models may share it, since `get` does not find files of another fingerprint.
    capacity: limit in bytes.
    fingerprint: identifies everything except the image that decides features: weights, type, kernels.
    link: copies features between host and device.
    ttl_s: seconds after which an output expires; None: never.
    """

    name = "disk"

    def __init__(
        self, folder: Path, capacity: int, fingerprint: str, link: HostLink, ttl_s: float | None = None
    ) -> None:
        self._store = DiskStore(folder, capacity, ttl_s=ttl_s)
        self._capacity = capacity
        self._fingerprint = fingerprint
        self._link = link

    def get(self, key: str) -> VisualFeatures | None:
        entry = self._store.read(self._name(key))
        if entry is None:
            return None
        tensors = [_tensor(array) for array in entry.arrays.items]
        return self._link.to_device(VisualFeatures.from_tensors(tensors, entry.written_at))

    def put(self, key: str, features: VisualFeatures) -> None:
        name = self._name(key)
        if name in self._store:
            return
        tensors = self._link.to_host(features).tensors
        self._store.put(name, Arrays(tuple(_array(str(i), tensor) for i, tensor in enumerate(tensors))))

    def __contains__(self, key: str) -> bool:
        return self._name(key) in self._store

    def drop(self, key: str) -> None:
        self._store.drop(self._name(key))

    def clear(self) -> None:
        self._store.clear()

    def sweep(self) -> None:
        """Do nothing: the store's own thread removes expired files."""

    def check_integrity(self) -> None:
        """Do nothing: other processes may change the folder at any time."""

    def flush(self, timeout: float) -> bool:
        """Wait until all outputs are written. Returns False if that takes longer than `timeout` seconds."""
        return self._store.flush(timeout)

    def close(self) -> None:
        self._store.close()

    def stats(self) -> dict[str, float]:
        stats = self._store.stats()
        return {
            "bytes": stats.bytes,
            "capacity_bytes": self._capacity,
            "entries": stats.entries,
            "hits": stats.hits,
            "misses": stats.misses,
            "writes": stats.writes,
            "dropped": stats.drops,
            "evictions": stats.evictions,
            "expired": stats.expirations,
            "corrupt": stats.corrupt,
            "off": float(stats.off is not None),
        }

    def _name(self, key: str) -> str:
        """File name of a key: its hash, because the tenant's salt in it must stay secret."""
        return hashlib.sha256(f"{self._fingerprint}\x00{key}".encode()).hexdigest()


def fingerprint(encoder: list[nn.Module], *details: str) -> str:
    """Digest of everything that decides the outputs of an encoder.

    encoder: its modules; all of their weights are read, as they were loaded, and codes of weights that wait
        to be packed.
    details: whatever else decides the outputs. Fovea's version is always added.
    """
    digest = hashlib.blake2b(__version__.encode(), digest_size=20)
    for module in encoder:
        for name, tensor in (*sorted(module.state_dict().items()), *_codes(module)):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    digest.update("\x00".join(details).encode())
    return digest.hexdigest()


def _codes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all codes in a module, each with a name that has the codes' other details."""
    for path, layer in module.named_modules():
        parts: Sequence[Codes] = getattr(layer, "codes", ())
        for number, part in enumerate(parts):
            zero = "" if isinstance(part.zero, Tensor) else part.zero
            for name, tensor in part.tensors().items():
                yield f"{path} {number} {name} {part.bits} {part.group} {part.outer_groups} {zero}", tensor


def _array(name: str, tensor: Tensor) -> Array:
    plain = tensor.detach().cpu().contiguous()
    return Array(
        name,
        str(plain.dtype).removeprefix("torch."),
        tuple(plain.shape),
        plain.view(-1).view(torch.uint8).numpy().data,
    )


def _tensor(array: Array) -> Tensor:
    return torch.frombuffer(array.data, dtype=getattr(torch, array.dtype)).view(array.shape)


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
