"""The stream in which the encoder's slices run: the calling thread on a CPU, a stream of their own on CUDA.

A mark is a point in the stream between two slices. The output of a slice may be read as soon as the mark
after it is done. On a CPU a mark is done when it is set. This way the callers need no code of their own for
each device.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, Self

import torch

from fovea.engine.vision.features import VisualFeatures


class Mark(Protocol):
    """A point in a stream: done when all work that was launched before it has ended."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None: ...

    def since(self, earlier: Self) -> float:
        """Return the seconds from an earlier mark to this one. Both must be done."""
        ...


class EncoderStream(Protocol):
    """The stream in which an encoder's slices run."""

    def activate(self) -> AbstractContextManager[object]:
        """Return a context. Work that is launched inside it runs in this stream."""
        ...

    def mark(self) -> Mark: ...

    def hand_over(self, features: VisualFeatures) -> None:
        """Tell the allocator that the decoder still reads these features. They must be complete.

        Otherwise it might reuse their memory before the decoder's stream has read them.
        """
        ...


class _DoneMark:
    done = True

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        """Return at once: the mark is always done."""

    def since(self, earlier: Self) -> float:
        return self._at - earlier._at


class InlineStream:
    """The encoder's stream on a CPU: a slice runs in the calling thread and is done when its call returns."""

    def activate(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        return _DoneMark()

    def hand_over(self, features: VisualFeatures) -> None:
        """Do nothing: encoder and decoder share the memory."""


class _EventMark:
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
    """A CUDA stream of the encoder's own.

    It needs to wait for no other stream: the weights were loaded before it was created, and pixels are copied
    in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def activate(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        return _EventMark(self._stream)

    def hand_over(self, features: VisualFeatures) -> None:
        for tensor in features.tensors:
            tensor.record_stream(torch.cuda.current_stream(self._device))


def encoder_stream(device: torch.device) -> EncoderStream:
    """Return the kind of stream that fits the device."""
    return CudaStream(device) if device.type == "cuda" else InlineStream()
