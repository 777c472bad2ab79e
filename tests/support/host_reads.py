"""A guard that makes every read of a tensor on the host raise.

A CUDA graph records launches. A step that is recorded cannot wait for a number that the device computes, so
the code inside must not read one. On a CPU every read works, so tests forbid them all instead: values,
results whose shape depends on values, and copies between host and device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TENSOR_METHODS = (
    "item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__",
)  # fmt: skip
BY_VALUE = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
WITH_INDICES = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)
"""They read values only if an index is a mask, whatever their tags say."""
MASKS = torch.bool, torch.uint8


class HostRead(AssertionError):
    """A tensor was read on the host where no read is allowed."""


class _NoReads(TorchDispatchMode):
    """Raises on every operation that reads values on the host, also those within torch's own functions."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reads = any(tag in func.tags for tag in BY_VALUE)
        if func in WITH_INDICES:
            reads = any(index is not None and index.dtype in MASKS for index in args[1])
        if reads:
            raise HostRead(f"{func} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


def _refuse(name: str) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        raise HostRead(f"Tensor.{name} reads a tensor on the host")

    return method


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if "device" in kwargs or any(isinstance(value, (str, torch.device)) for value in args):
        raise HostRead("Tensor.to copies between host and device")
    return _tensor_to(tensor, *args, **kwargs)


def _make_tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    if device is not None:
        raise HostRead("torch.tensor copies numbers to a device, and waits for it")
    return _torch_tensor(*args, **kwargs)


_tensor_to, _torch_tensor = Tensor.to, torch.tensor


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Let every read of a tensor on the host raise HostRead, in this thread."""
    with ExitStack() as stack:
        for name in TENSOR_METHODS:
            stack.enter_context(patch.object(Tensor, name, _refuse(name)))
        stack.enter_context(patch.object(Tensor, "to", _to))
        stack.enter_context(patch.object(torch, "tensor", _make_tensor))
        stack.enter_context(_NoReads())
        yield
