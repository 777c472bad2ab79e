"""Long computations that can be put aside: generators that yield between slices of some milliseconds.

What is computed does not depend on when, or whether, somebody pauses: slices are cut by shape alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fovea.core.stage import stage
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.kernels.torch.kernels import TorchKernels

Made = TypeVar("Made")
Slices = Generator[None, None, Made]
Ahead = Callable[[], Iterator[ProcessedImage]]
"""Images that will be asked for next, as far as it is known now: what would leave room in a slice may take some of them along."""

CPU_ROWS, OTHER_ROWS = 512, 16384
"""Rows of a slice: on two cores of a server a block of a 0.1 B tower takes 5 to 10 ms for 512."""
PAIRS_PER_ROW = 8192
"""Pairs of rows that attend to each other in a slice, all heads together, per row of a slice."""


def finished(slices: Slices[Made]) -> Made:
    """Run to the end."""
    while True:
        try:
            next(slices)
        except StopIteration as stop:
            made: Made = stop.value
            return made


def slice_rows(x: Tensor) -> int:
    return CPU_ROWS if x.device.type == "cpu" else OTHER_ROWS


def cuts(count: int, size: int) -> Iterator[slice]:
    """[0, count) in ranges of at most `size`, and of one where not even that much fits."""
    size = max(1, size)
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


def by_rows(layer: Callable[[Tensor], Tensor], x: Tensor) -> Slices[Tensor]:
    """A layer over the rows of x, which may join neighbouring rows, of which a slice holds a multiple."""
    parts = []
    for rows in cuts(x.shape[0], slice_rows(x)):
        parts.append(layer(x[rows]))
        yield
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def projecting(layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The layer, as what stands between tower and decoder: a stage of its own to whoever measures."""

    def apply(x: Tensor) -> Tensor:
        with stage("projector"):
            return layer(x)

    return apply


def attend_slices(
    kernels: TorchKernels, qkv: Tensor, runs: Sequence[tuple[int, int]], heads: int
) -> Slices[Tensor]:
    """`TorchKernels.attend_groups` of all runs: some groups at a time, and large groups some heads at a time.

    qkv (T, 3 * heads, head_dim); returns (T, heads * head_dim).
    """
    out = qkv.new_empty((qkv.shape[0], heads * qkv.shape[2]))
    threads, first, pairs = torch.get_num_threads(), 0, slice_rows(qkv) * PAIRS_PER_ROW
    for groups, count in runs:
        per_head = count * count
        # Fewer heads than threads would leave threads idle.
        together = min(heads, max(threads, pairs // per_head))
        for some in cuts(groups, max(1, pairs // (per_head * heads))):
            rows = slice(first + some.start * count, first + some.stop * count)
            for part in cuts(heads, together):
                kernels.attend_groups(qkv[rows], some.stop - some.start, heads, part, out[rows])
                yield
        first += groups * count
    return out
