"""What this machine does at best: bytes per second from memory, operations per second of a large product.

Measured with the kernels that a model runs on and as many threads, in a second or two. The best of several tries counts:
whatever else the machine does makes it slower, never faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels.base import Kernels, Product
from fovea.kernels.quantize import Format

MIB = 1 << 20
LEAST, MOST, MOST_WEIGHT = 4 * MIB, 1024 * MIB, 256 * MIB
"""Bytes that a stream reads over and over: as many as the model has, within these."""
CPU_PRODUCT, CUDA_PRODUCT = (1024, 4096), (8192, 8192)
"""Rows, and side of the weight."""
CPU_ROWS = (256, 1024)
TRY_S, TRIES = 0.25, 3
PLAIN = ""
"""The name under which weights as stored are measured."""


@dataclass(frozen=True, slots=True)
class Machine:
    """bandwidth: bytes/s of a stream over `stream_bytes`. peaks: operations/s (a multiply and an add are two) of a
    product, by the name of its weight's format, PLAIN for weights as stored.
    """

    bandwidth: float
    peaks: Mapping[str, float]
    stream_bytes: int
    threads: int
    kernels: str

    def peak(self, format: str) -> float:
        return self.peaks[format]

    def best(self, other: Machine) -> Machine:
        """Of two measurements of one machine the better ones."""
        peaks = {name: max(count, other.peaks[name]) for name, count in self.peaks.items()}
        return replace(self, bandwidth=max(self.bandwidth, other.bandwidth), peaks=peaks)


def calibrate(
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    formats: Iterable[Format | None],
    weights: int,
) -> Machine:
    """formats: of the model's weights. weights: bytes of them, which decide between cache and memory."""
    size = min(max(weights, LEAST), MOST)
    peaks = {}
    for format in dict.fromkeys((None, *formats)):
        peaks[PLAIN if format is None else format.name] = _peak(kernels, dtype, device, format)
    return Machine(
        bandwidth=_bandwidth(kernels, dtype, device, size),
        peaks=peaks,
        stream_bytes=size,
        threads=torch.get_num_threads(),
        kernels=type(kernels).__name__,
    )


def _bandwidth(kernels: Kernels, dtype: torch.dtype, device: torch.device, size: int) -> float:
    """The better of two readers: a sum over numbers, and a product of one row with a weight, as packed for it."""
    numbers = torch.ones(size // 4, device=device)
    best = size / _seconds(lambda: numbers.sum(), device)
    side = 4096
    rows = min(size, MOST_WEIGHT) // (side * dtype.itemsize)
    if rows:
        weight = _weight(rows, side, dtype, device)
        product = _product(kernels, weight, None)
        read = getattr(product, "nbytes", weight.nbytes)
        x = torch.ones(1, side, dtype=dtype, device=device)
        best = max(best, read / _seconds(lambda: product(x, None), device))
    return best


def _peak(kernels: Kernels, dtype: torch.dtype, device: torch.device, format: Format | None) -> float:
    rows, side = CUDA_PRODUCT if device.type == "cuda" else CPU_PRODUCT
    product = _product(kernels, _weight(side, side, dtype, device), format)
    best = 0.0
    for some in (rows,) if device.type == "cuda" else CPU_ROWS:
        x = torch.ones(some, side, dtype=dtype, device=device)
        seconds = _seconds(lambda x=x: product(x, None), device)  # type: ignore[misc]
        best = max(best, 2.0 * some * side * side / seconds)
    return best


def _product(kernels: Kernels, weight: Tensor, format: Format | None) -> Product:
    if format is not None:
        return kernels.quantized(weight, None, None, False, format)
    packed = kernels.product(weight, None, None, False)
    return packed or (lambda x, residual: functional.linear(x, weight))


def _weight(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers, a few of them many times: drawing all of them would take longer than measuring."""
    few = torch.randn(64, columns, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    return few.to(device, dtype).repeat(-(-rows // 64), 1)[:rows]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call, the least of all. As many calls as fit into some tenths of a second, and a few at least."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    settle()
    best, until, tries = float("inf"), time.perf_counter() + TRY_S, 0
    while tries < TRIES or time.perf_counter() < until:
        started = time.perf_counter()
        work()
        settle()
        best = min(best, time.perf_counter() - started)
        tries += 1
    return best
