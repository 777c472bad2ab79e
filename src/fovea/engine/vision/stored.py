"""Encoder outputs on disk: what a restart, or another process with the same folder, need not encode again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

from fovea import __version__
from fovea.engine.cache.arrays import Array, Arrays
from fovea.engine.cache.disk import DiskStats, DiskStore
from fovea.engine.vision.features import VisualFeatures


class StoredFeatures:
    """A `DiskStore` of features. `get` reads and checks a file, so it belongs into a worker thread; `put` only queues.

    fingerprint: of everything beside the image that decides its features: weights, type, kernels. Files of another
    fingerprint are never found, so a folder may be shared by models.
    """

    def __init__(self, folder: Path, capacity: int, fingerprint: str, device: torch.device) -> None:
        self._store = DiskStore(folder, capacity)
        self._fingerprint = fingerprint
        self._device = device

    def get(self, key: str) -> VisualFeatures | None:
        found = self._store.get(self._named(key))
        if found is None:
            return None
        tensors = [_tensor(array).to(self._device) for array in found.items]
        return VisualFeatures(tensors[0], tuple(tensors[1:]))

    def put(self, key: str, features: VisualFeatures) -> None:
        name = self._named(key)
        if name in self._store:
            return
        tensors = (features.embeds, *features.deepstack)
        self._store.put(name, Arrays(tuple(_array(str(i), tensor) for i, tensor in enumerate(tensors))))

    def __contains__(self, key: str) -> bool:
        return self._named(key) in self._store

    def clear(self) -> None:
        self._store.clear()

    def flush(self, timeout: float) -> bool:
        """Wait until what was put is written; False: it took longer."""
        return self._store.flush(timeout)

    def close(self) -> None:
        self._store.close()

    def stats(self) -> DiskStats:
        return self._store.stats()

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
