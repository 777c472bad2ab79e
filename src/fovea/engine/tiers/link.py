"""Features on their way between the device and host memory, beside whatever the device computes.

On CUDA bytes pass through a small pinned buffer on a stream of their own, so the engine's stream never waits for them;
the thread that asks for a copy does, and must not be the engine's. They rest in plain memory, because pinned memory is
handed out in powers of two and would make a ceiling in bytes a matter of luck. On a CPU it is the same two copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from fovea.engine.vision.features import VisualFeatures

STAGING_BYTES = 16 << 20


class HostLink:
    """Thread-safe; one copy at a time."""

    def __init__(self, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._size = staging_bytes
        self._staging: Tensor | None = None
        self._lock = threading.Lock()

    def to_host(self, features: VisualFeatures) -> VisualFeatures:
        """A copy in host memory."""
        return self._moved(features, lambda tensor: torch.empty_like(tensor, device="cpu"))

    def to_device(self, features: VisualFeatures) -> VisualFeatures:
        """A copy on the device, complete when this returns."""
        moved = self._moved(features, lambda tensor: torch.empty_like(tensor, device=self._device))
        if self._stream is not None:
            for tensor in moved.tensors:
                tensor.record_stream(torch.cuda.default_stream(self._device))
        return moved

    @torch.inference_mode()
    def _moved(self, features: VisualFeatures, empty: Callable[[Tensor], Tensor]) -> VisualFeatures:
        with self._lock, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            copies = []
            for tensor in features.tensors:
                source = tensor.contiguous()
                copies.append(empty(source))
                self._copy(_flat(source), _flat(copies[-1]))
        return VisualFeatures.from_tensors(copies, features.created_at)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """Flat bytes, either side on the device."""
        if self._staging is None:
            self._staging = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._cuda)
        for start in range(0, len(source), self._size):
            part = slice(start, min(len(source), start + self._size))
            staged = self._staging[: part.stop - part.start]
            staged.copy_(source[part], non_blocking=True)
            self._finish()
            target[part].copy_(staged, non_blocking=True)
            self._finish()

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
