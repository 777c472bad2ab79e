"""Encoder outputs on disk: what a restart, or another process with the same folder, need not encode again."""

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
    """A `DiskStore` of features. `get` reads and checks a file, `put` looks for one and may wait for the device, so both
    belong into worker threads.

    fingerprint: of everything beside the image that decides its features: weights, type, kernels. Files of another
    fingerprint are never found, so a folder may be shared by models.
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
        found = self._store.look(self._named(key))
        if found is None:
            return None
        tensors = [_tensor(array) for array in found.arrays.items]
        return self._link.to_device(VisualFeatures.from_tensors(tensors, found.written))

    def put(self, key: str, features: VisualFeatures) -> None:
        name = self._named(key)
        if name in self._store:
            return
        tensors = self._link.to_host(features).tensors
        self._store.put(name, Arrays(tuple(_array(str(i), tensor) for i, tensor in enumerate(tensors))))

    def __contains__(self, key: str) -> bool:
        return self._named(key) in self._store

    def drop(self, key: str) -> None:
        self._store.drop(self._named(key))

    def clear(self) -> None:
        self._store.clear()

    def sweep(self) -> None:
        """The store's own thread looks after its folder."""

    def check_integrity(self) -> None:
        """What a folder holds is anybody's to change."""

    def flush(self, timeout: float) -> bool:
        """Wait until what was put is written; False: it took longer."""
        return self._store.flush(timeout)

    def close(self) -> None:
        self._store.close()

    def stats(self) -> dict[str, float]:
        found = self._store.stats()
        return {
            "bytes": found.bytes,
            "capacity_bytes": self._capacity,
            "entries": found.entries,
            "hits": found.hits,
            "misses": found.misses,
            "writes": found.writes,
            "dropped": found.dropped,
            "evictions": found.evictions,
            "expired": found.expired,
            "corrupt": found.corrupt,
            "off": float(found.off is not None),
        }

    def _named(self, key: str) -> str:
        """A key holds the tenant's salt, which is nobody's business who reads the folder."""
        return hashlib.sha256(f"{self._fingerprint}\x00{key}".encode()).hexdigest()


def fingerprint(encoder: list[nn.Module], *details: str) -> str:
    """Of all weights of the modules, as they were loaded, and whatever else decides their outputs, this code included."""
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
