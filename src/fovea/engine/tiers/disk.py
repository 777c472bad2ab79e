"""The disk tier of encoder outputs, which a restart or another process with the same folder can reuse."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

from fovea import __version__
from fovea.engine.cache.arrays import Array, Arrays
from fovea.engine.cache.disk import DiskStore
from fovea.engine.tiers.link import HostLink
from fovea.engine.vision.features import VisualFeatures


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

    encoder: its modules; all of their weights are read, as they were loaded.
    details: whatever else decides the outputs. Fovea's version is always added.
    """
    digest = hashlib.blake2b(__version__.encode(), digest_size=20)
    for module in encoder:
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    digest.update("\x00".join(details).encode())
    return digest.hexdigest()


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
