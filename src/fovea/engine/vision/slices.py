"""Computations that can pause: generators that yield after every slice of a few milliseconds.

The boundaries of slices depend on shapes alone, so the result does not depend on when the caller pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from fovea.core.measure import stage
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.engine.vision.projector_timer import current_timer
from fovea.kernels.base import Kernels

Result = TypeVar("Result")
Slices = Generator[None, None, Result]
"""A computation that can pause: it yields after every slice, and returns the result after the last one."""
UpcomingImages = Callable[[], Iterator[ProcessedImage]]
"""A function that yields the images that are probably encoded next. An encoder may add some to a slice."""

CPU_ROWS, OTHER_ROWS = 512, 16384
"""Rows of a slice on a CPU, and on other devices.

On two server cores, 512 rows of one block of a 0.1 B tower take 5 to 10 ms.
"""
PAIRS_PER_ROW = 8192
"""Attention pairs (query, key, head) that a slice may have, per row of `slice_rows`."""


def run_to_end(slices: Slices[Result]) -> Result:
    """Run all slices without a pause and return the result."""
    while True:
        try:
            next(slices)
        except StopIteration as stop:
            result: Result = stop.value
            return result


def slice_rows(x: Tensor) -> int:
    """Return the number of rows of a slice on the device of `x`."""
    return CPU_ROWS if x.device.type == "cpu" else OTHER_ROWS


def cuts(count: int, size: int) -> Iterator[slice]:
    """Cut [0, count) into ranges of at most `size`. A size below 1 counts as 1."""
    size = max(1, size)
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


def apply_by_rows(layer: Callable[[Tensor], Tensor], x: Tensor, *, unit: int = 1) -> Slices[Tensor]:
    """Apply a layer to the rows of x, one slice of rows at a time.

    unit: neighbouring rows that the layer merges into one. A slice holds a multiple of it.
    """
    outputs = []
    for rows in cuts(x.shape[0], max(1, slice_rows(x) // unit) * unit):
        outputs.append(layer(x[rows]))
        yield
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def as_projector(layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a projector layer, so that metrics and profiles (stage "projector") know its time."""

    def apply(x: Tensor) -> Tensor:
        timer = current_timer()
        with stage("projector"), nullcontext() if timer is None else timer.call():
            return layer(x)

    return apply


def attend_slices(
    kernels: Kernels, qkv: Tensor, runs: Sequence[tuple[int, int]], heads: int
) -> Slices[Tensor]:
    """Apply `Kernels.attend_groups` to all runs, one slice at a time.

    A slice is some groups of a run; of a group that is too large for one slice, it is some of the heads.

    qkv: (T, 3 * heads, head_dim).
    runs: (groups, rows per group), from the first row on.

    Returns (T, heads * head_dim).
    """
    out = qkv.new_empty((qkv.shape[0], heads * qkv.shape[2]))
    threads, first, pairs = torch.get_num_threads(), 0, slice_rows(qkv) * PAIRS_PER_ROW
    for groups, count in runs:
        per_head = count * count
        # With fewer heads than threads, some threads would be idle.
        heads_per_slice = min(heads, max(threads, pairs // per_head))
        for some_groups in cuts(groups, max(1, pairs // (per_head * heads))):
            rows = slice(first + some_groups.start * count, first + some_groups.stop * count)
            for some_heads in cuts(heads, heads_per_slice):
                number = some_groups.stop - some_groups.start
                kernels.attend_groups(qkv[rows], number, heads, some_heads, out[rows])
                yield
        first += groups * count
    return out
