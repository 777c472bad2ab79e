"""Copies features between the device and host memory while the device computes.

On CUDA, bytes pass through a small pinned buffer in a stream of their own, so the engine's stream never waits
for them. The calling thread does wait, so it must not be the engine's thread. In host memory, features are
stored in plain memory: pinned memory is allocated in powers of two, so a limit in bytes would not hold. On a
CPU the same two copies are made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from fovea.engine.vision.features import VisualFeatures

STAGING_BYTES = 16 << 20
"""Size of the pinned buffer."""


class HostLink:
    """Copies features to host memory and back. Thread-safe; makes one copy at a time.

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
