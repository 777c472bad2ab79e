"""The memory of the device: which errors mean that it is full, and how to free what is only cached."""

from __future__ import annotations

import gc

import torch

FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "you tried to allocate")
"""Parts of the messages of errors without a type of their own: of CUDA, its libraries, torch on a CPU."""


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
