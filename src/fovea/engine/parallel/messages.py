"""Announcements of the driver as bytes: the name of an operation, and its arguments.

They are pickles, and whoever can send one can run any code in a worker. So the network between the processes
of one engine must be private.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fovea.engine.layers.step import DecoderMemory

MEMORY = "memory"
"""Stands for the memory of the engine's KV pool, of which each process has its own share."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return MEMORY if isinstance(value, DecoderMemory) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().cpu().reshape(-1)
        if flat.stride(0) != 1:  # also a tensor of one number may have any stride
            flat = flat.clone(memory_format=torch.contiguous_format)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return _tensor, (value.dtype, tuple(value.shape), data)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device, memory: Callable[[], DecoderMemory]) -> None:
        super().__init__(file)
        self._device, self._memory = device, memory

    def persistent_load(self, name: str) -> Any:
        return self._memory()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, "_tensor"):
            return self._tensor
        return super().find_class(module, name)

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> Tensor:
        return _tensor(dtype, shape, data).to(self._device)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def pack(name: str, args: tuple[Any, ...]) -> bytes:
    """Return an announcement as bytes. Memory in the arguments becomes the receiver's own."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump((name, args))
    return file.getvalue()


def unpack(
    data: bytes, device: torch.device, memory: Callable[[], DecoderMemory]
) -> tuple[str, tuple[Any, ...]]:
    """Return name and arguments. device: gets the tensors. memory: returns the receiver's own memory."""
    name, args = _Unpickler(io.BytesIO(data), device, memory).load()
    return name, args
