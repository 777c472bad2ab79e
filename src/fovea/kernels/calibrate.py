"""Measures the best rates of this machine: bytes/s from memory, and operations/s of a large product.

The measurement uses the kernels and the number of threads that the model runs with, and takes a second or
two. The best of several tries counts, because other work on the machine makes a try slower, never faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels.base import Kernels, Product
from fovea.kernels.codes import Format

MIB = 1 << 20
MIN_STREAM_BYTES, MAX_STREAM_BYTES = 4 * MIB, 1024 * MIB
"""Limits of the bytes that a stream reads repeatedly. Within them it reads as many as the weights have."""
MAX_WEIGHT_BYTES = 256 * MIB
"""Largest weight that is multiplied to measure the bandwidth."""
CPU_PRODUCT, CUDA_PRODUCT = (1024, 4096), (8192, 8192)
"""Rows of x and side of the weight in the product that measures the peak."""
CPU_ROWS = (256, 1024)
"""Numbers of rows that are tried on a CPU, instead of the rows above."""
TRY_S, TRIES = 0.25, 3
"""Seconds of repetitions, and the least number of repetitions."""
PLAIN = ""
"""Name of the peak that is measured with a weight that is not quantized."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The best rates of a machine.

    bandwidth: bytes/s of a stream over `stream_bytes`.
    peaks: operations/s of a product by the name of its weight's format, PLAIN for weights that are not
        quantized. A multiplication with an addition counts as two operations.
    stream_bytes: bytes that the stream read, over and over.
    threads: threads of the measurement.
    kernels: class name of the kernels.
    """

    bandwidth: float
    peaks: Mapping[str, float]
    stream_bytes: int
    threads: int
    kernels: str

    def peak(self, format: str) -> float:
        return self.peaks[format]

    def best(self, other: Machine) -> Machine:
        """Return the better figures of two measurements of one machine."""
        peaks = {name: max(count, other.peaks[name]) for name, count in self.peaks.items()}
        return replace(self, bandwidth=max(self.bandwidth, other.bandwidth), peaks=peaks)


def calibrate(
    kernels: Kernels, dtype: torch.dtype, device: torch.device, formats: Iterable[Format | None], weights: int
) -> Machine:
    """Measure the machine.

    formats: formats of the model's weights; None: not quantized.
    weights: bytes of the weights. They decide whether the stream fits into the processor's cache.
    """
    size = min(max(weights, MIN_STREAM_BYTES), MAX_STREAM_BYTES)
    peaks = {}
    for format in dict.fromkeys((None, *formats)):
        peaks[PLAIN if format is None else format.name] = _peak(kernels, dtype, device, format)
    bandwidth = _bandwidth(kernels, dtype, device, size)
    return Machine(bandwidth, peaks, size, torch.get_num_threads(), type(kernels).__name__)


def _bandwidth(kernels: Kernels, dtype: torch.dtype, device: torch.device, size: int) -> float:
    """Return the better rate of two readers: a sum, and a product of one row with a packed weight."""
    numbers = _normal(64, size // 256, torch.float32, device).flatten()
    best = size / _seconds(lambda: numbers.sum(), device)
    side = 4096
    rows = min(size, MAX_WEIGHT_BYTES) // (side * dtype.itemsize)
    if rows:
        weight = _normal(rows, side, dtype, device)
        product = _product(kernels, weight, None)
        weight_bytes = getattr(product, "nbytes", weight.nbytes)
        x = _normal(1, side, dtype, device)
        best = max(best, weight_bytes / _seconds(lambda: product(x, None), device))
    return best


def _peak(kernels: Kernels, dtype: torch.dtype, device: torch.device, format: Format | None) -> float:
    rows, side = CUDA_PRODUCT if device.type == "cuda" else CPU_PRODUCT
    product = _product(kernels, _normal(side, side, dtype, device), format)
    best = 0.0
    for count in (rows,) if device.type == "cuda" else CPU_ROWS:
        x = _normal(count, side, dtype, device)
        seconds = _seconds(lambda x=x: product(x, None), device)  # type: ignore[misc]
        best = max(best, 2.0 * count * side * side / seconds)
    return best


def _product(kernels: Kernels, weight: Tensor, format: Format | None) -> Product:
    if format is not None:
        return kernels.quantized_product(weight, None, None, False, format)
    packed = kernels.product(weight, None, None, False)
    return packed or (lambda x, residual: functional.linear(x, weight))


def _normal(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normally distributed numbers, because a GPU computes faster on constant ones than on a model's.

    Switching fewer bits takes less power, so its clock stays higher. On a CPU the rows repeat after 64:
    drawing all of them would take longer than measuring.
    """
    drawn = rows if device.type == "cuda" else min(rows, 64)
    few = torch.randn(drawn, columns, generator=torch.Generator(device).manual_seed(0), device=device)
    return few.mul_(0.02).to(dtype).repeat(-(-rows // drawn), 1)[:rows]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the time of the fastest call. Calls are repeated for TRY_S seconds, at least TRIES times."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    synchronize()
    best, deadline, tries = float("inf"), time.perf_counter() + TRY_S, 0
    while tries < TRIES or time.perf_counter() < deadline:
        start = time.perf_counter()
        work()
        synchronize()
        best = min(best, time.perf_counter() - start)
        tries += 1
    return best
