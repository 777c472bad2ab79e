"""Copies between host and device that do not wait for the work that was launched before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def row_index(rows: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of rows as a tensor on the device, to index a batch."""
    return to_device(torch.tensor(rows, dtype=torch.int64), device)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device. From memory that is not pinned, a copy would wait for all launched work."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one copy, which waits for nothing."""
    words = [-(-array.nbytes // 8) for array in arrays]
    packed = np.zeros(sum(words), dtype=np.int64)
    ends = list(accumulate(words))
    for array, end, count in zip(arrays, ends, words, strict=True):
        packed[end - count : end].view(np.uint8)[: array.nbytes] = array.reshape(-1).view(np.uint8)
    copied = to_device(torch.from_numpy(packed), device)
    return [
        copied[end - count : end].view(torch.from_numpy(array).dtype)[: array.size].view(array.shape)
        for array, end, count in zip(arrays, ends, words, strict=True)
    ]


class HostCopy:
    """A copy of a tensor to the host that is not waited for until `read`."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers
