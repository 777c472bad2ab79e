"""CUDA graphs of an encoder's blocks, by number of rows: about eight launches instead of hundreds.

The rows of a call are padded to a multiple of `STEP`. A graph is recorded when a number of rows comes for the
second time: the first time compiles kernels and lets libraries allocate memory, which a graph must not
record. Padding belongs to no span, so it changes no row of an image.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fovea.kernels.spans import Spans, fits_one_launch

STEP = 512
MOST_ROWS = 8192
"""Most rows of a graph. Beyond them the work takes longer than its launches."""
MOST_GRAPHS = 64
SHORT = 256
"""If no span is longer than this, attention gets it as the longest length; otherwise it gets all rows."""
FEW_SPANS = 16
"""Most spans in a layout of long spans. One of short spans has room for one per 16 rows, and 16 more."""
log = logging.getLogger("fovea.engine")
Inputs = tuple[Tensor, Tensor | None, Tensor | None]
"""Rows (T, hidden), and cos and sin (T, 1, head_dim), or None."""
Compute = Callable[[Tensor, Tensor | None, Tensor | None, Sequence[Spans]], Tensor]
"""Computes blocks without a pause: rows (T, hidden), cos, sin, and the spans of each layout, to rows."""


class BlockGraphs:
    """The graphs of one encoder. For the thread and the stream in which it runs."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: set[Hashable] = set()
        self._refused = False

    @property
    def recorded(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def run(
        self,
        key: Hashable,
        head_dim: int,
        inputs: Inputs,
        spans: Sequence[Spans],
        compute: Compute,
    ) -> Tensor | None:
        """Return the result of `compute` from a graph; None: there is none, so the caller computes it.

        key: names the blocks.
        head_dim: numbers per head in their attention.
        spans: the spans of each layout.
        """
        rows, size = len(inputs[0]), -(-len(inputs[0]) // STEP) * STEP
        limits = tuple(SHORT if each.longest <= SHORT else size for each in spans)
        fits = all(
            len(each.bounds) <= _places(limit, size) for each, limit in zip(spans, limits, strict=True)
        )
        possible = not self._refused and fits and fits_one_launch(inputs[0].dtype, head_dim)
        if not possible or size > MOST_ROWS:
            return None
        name = key, size, limits
        graph = self._graphs.get(name)
        if graph is None:
            if name not in self._seen or len(self._graphs) >= MOST_GRAPHS:
                self._seen.add(name)
                return None
            graph = self._record(name, size, limits, inputs, spans, compute)
            if graph is None:
                return None
        return graph.run(rows, inputs, spans)

    def _record(
        self,
        name: Hashable,
        size: int,
        limits: tuple[int, ...],
        inputs: Inputs,
        spans: Sequence[Spans],
        compute: Compute,
    ) -> _Graph | None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            graph = self._graphs[name] = _Graph(self._pool, size, limits, inputs, spans, compute)
        except RuntimeError as error:
            self._refused = True
            log.warning("the encoder runs without CUDA graphs: %s", str(error).splitlines()[0])
            return None
        return graph


class _Graph:
    """A recording, and the memory of its inputs and its result."""

    def __init__(
        self,
        pool: Any,
        size: int,
        limits: tuple[int, ...],
        inputs: Inputs,
        spans: Sequence[Spans],
        compute: Compute,
    ) -> None:
        self._inputs = [None if each is None else each.new_zeros((size, *each.shape[1:])) for each in inputs]
        self._bounds = [
            torch.zeros(_places(limit, size), dtype=torch.int32, device=inputs[0].device) for limit in limits
        ]
        static = [Spans((), bounds, limit) for bounds, limit in zip(self._bounds, limits, strict=True)]
        self._fill(len(inputs[0]), inputs, spans)
        x, cos, sin = self._inputs
        assert x is not None
        compute(x, cos, sin, static)  # a library may need memory for this number of rows
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may pin memory meanwhile. This mode keeps their calls from invalidating the graph.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._out = compute(x, cos, sin, static)
        finally:
            self._graph.capture_end()

    def run(self, rows: int, inputs: Inputs, spans: Sequence[Spans]) -> Tensor:
        """Return the result for other inputs, in memory of its own."""
        self._fill(rows, inputs, spans)
        self._graph.replay()
        return self._out[:rows].clone()

    def _fill(self, rows: int, inputs: Inputs, spans: Sequence[Spans]) -> None:
        for static, given in zip(self._inputs, inputs, strict=True):
            if static is not None and given is not None:
                static[:rows].copy_(given)
        for bounds, each in zip(self._bounds, spans, strict=True):
            bounds[: len(each.bounds)].copy_(each.bounds)
            bounds[len(each.bounds) :].fill_(rows)  # the other spans are empty


def _places(limit: int, size: int) -> int:
    """Return the number of bounds of a layout whose spans are launched as if they had `limit` rows."""
    return 1 + (size // FEW_SPANS + FEW_SPANS if limit == SHORT else FEW_SPANS)
