"""Announcements of the driver as bytes: the name of an operation, and its arguments.

They are pickles, and whoever can send one can run any code in a worker. So the network between the processes
of one engine must be private.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fovea.engine.layers.step import DecoderMemory

ENGINE = 0
"""Number of the engine's own memory. Each process has its share of a memory, so its number is sent."""


Memories = Callable[[int], DecoderMemory]
"""Returns the receiver's memory of a number."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memories: Mapping[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._memories = memories

    def persistent_id(self, value: Any) -> int | None:
        return self._memories.get(id(value), ENGINE) if isinstance(value, DecoderMemory) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().cpu().reshape(-1)
        if flat.stride(0) != 1:  # also a tensor of one number may have any stride
            flat = flat.clone(memory_format=torch.contiguous_format)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return _tensor, (value.dtype, tuple(value.shape), data)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device, memory: Memories) -> None:
        super().__init__(file)
        self._device, self._memory = device, memory

    def persistent_load(self, number: int) -> Any:
        return self._memory(number)

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


def pack(name: str, args: tuple[Any, ...], memories: Mapping[int, int]) -> bytes:
    """Return an announcement as bytes.

    memories: number of each memory but the engine's, by its id. The receiver gets its own of that number.
    """
    file = io.BytesIO()
    _Pickler(file, memories).dump((name, args))
    return file.getvalue()


def unpack(data: bytes, device: torch.device, memory: Memories) -> tuple[str, tuple[Any, ...]]:
    """Return name and arguments. device: gets the tensors. memory: returns memory of the receiver."""
    name, args = _Unpickler(io.BytesIO(data), device, memory).load()
    return name, args
