"""Where the encoder's slices run: on a CPU here and now, on CUDA beside the decoder, on a stream of their own.

Marks are moments between slices. Work is launched between two of them, and what it made may be read when the second is
done. On a CPU it is done when it is set, so that everything around is the same code.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, Self

import torch

from fovea.engine.vision.features import VisualFeatures


class Mark(Protocol):
    @property
    def done(self) -> bool: ...

    def wait(self) -> None: ...

    def since(self, earlier: Self) -> float:
        """Seconds between two marks that are done."""
        ...


class EncoderStream(Protocol):
    def beside(self) -> AbstractContextManager[object]:
        """Work is launched inside of it."""
        ...

    def mark(self) -> Mark: ...

    def hand_over(self, features: VisualFeatures) -> None:
        """They are done and will be read by the decoder, whose memory they may not become before it has."""
        ...


class _Now:
    done = True

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        """It is done."""

    def since(self, earlier: Self) -> float:
        return self._at - earlier._at


class SameThread:
    """No stream: a slice is done when its call returns."""

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        return _Now()

    def hand_over(self, features: VisualFeatures) -> None:
        """They are the decoder's already."""


class _Event:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    @property
    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, earlier: Self) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1000


class CudaStream:
    """A CUDA stream. Weights were there before it, and pixels are copied on it, so it waits for nobody."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        return _Event(self._stream)

    def hand_over(self, features: VisualFeatures) -> None:
        for tensor in features.tensors:
            tensor.record_stream(torch.cuda.current_stream(self._device))


def encoder_stream(device: torch.device) -> EncoderStream:
    return CudaStream(device) if device.type == "cuda" else SameThread()
