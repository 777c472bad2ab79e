"""The memory of the device: how much is in use, when it is full, and how to free what is unused."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Protocol

import torch

FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
"""Parts of messages of errors without a type of their own, of CUDA, its libraries, and torch on a CPU."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in FULL)


def free_unused(device: torch.device) -> None:
    """Return memory to the device that torch keeps for later tensors. On a CPU there is none."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of a device's memory at one time, in bytes.

    total: of the device.
    used: by all processes.
    reserved: by torch in this process. The rest of `used` is CUDA, its libraries, and other processes.
    """

    total: int
    used: int
    reserved: int


class DeviceMemory(Protocol):
    """The memory of a device. `CudaMemory` is the only one outside of tests."""

    def usage(self) -> Usage:
        """Return the use of the memory after everything that is unused was freed."""
        ...

    def begin_peak(self) -> int:
        """Begin to watch the memory that torch reserves. Returns the bytes that it has reserved now."""
        ...

    def peak(self) -> int:
        """Return the most bytes that torch had reserved since `begin_peak`."""
        ...


class CudaMemory:
    """The memory of a CUDA device.

    Peaks are those of reserved memory, not of tensors: torch keeps freed memory for each stream apart, and
    between tensors there are gaps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def usage(self) -> Usage:
        torch.cuda.synchronize(self._device)
        free_unused(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return Usage(total, total - free, torch.cuda.memory_reserved(self._device))

    def begin_peak(self) -> int:
        torch.cuda.synchronize(self._device)
        free_unused(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a device; None: the device is a CPU, whose memory is not divided in advance."""
    return CudaMemory(device) if device.type == "cuda" else None
