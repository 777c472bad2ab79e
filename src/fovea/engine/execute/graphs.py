"""Decode steps in batches of fixed sizes, recorded once as CUDA graphs and replayed: one launch in place of hundreds.

`schedule.padding` says where each number stands. A batch without a graph runs the same launches on the same memory one by
one, on any device; that is how the padding is tested where there is no card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fovea.engine.execute.attention_plan import fill_tables, slots
from fovea.engine.schedule.padding import Array, Padding, fill
from fovea.engine.schedule.plan import Work
from fovea.engine.schedule.shares import find_shares, write_shares
from fovea.kernels.attention import AttentionPlan, Decodes, Shares

Forward = Callable[[Tensor, Tensor, AttentionPlan], Tensor]
"""ids (T,), positions and a plan to hidden states (T, hidden)."""
WARM_UPS = 2


class PaddedDecodes:
    """All batches over one KV pool. capture: record each as a CUDA graph, now."""

    def __init__(self, padding: Padding, forward: Forward, device: torch.device, *, capture: bool) -> None:
        self.padding = padding
        self._batches = {key: _Batch(padding, *key, forward, device) for key in padding.batches()}
        if capture:
            # Graphs share the memory of what they compute, which the largest sizes first: no two run at once.
            pool = torch.cuda.graph_pool_handle()
            for batch in self._batches.values():
                batch.capture(pool)

    def run(self, rows: int, work: Sequence[Work], ids: Array, positions: Array) -> Tensor:
        """Hidden states of a step that decodes, (len(work), hidden), valid until the next one. rows: `padding.size`."""
        padding, size = self.padding, self.padding.block_size
        lengths = np.array([item.stop for item in work])
        tables = np.zeros((len(work), -(-int(lengths.max()) // size)), dtype=np.int64)
        fill_tables(tables, work, size)
        found = find_shares(tables, lengths, size, padding.shared_rows, least_rows=padding.least_rows)
        batch = self._batches[rows, bool(found)]
        fill(batch.arrays, padding, ids, positions, slots(work, size), tables, lengths)
        if found:
            write_shares(found, size, *(batch.arrays[name] for name in ("starts", "members", "prefixes")))
        return batch.run()[: len(work)]


class _Batch:
    """The memory of one size, on the host and on the device, and what runs over it."""

    def __init__(
        self, padding: Padding, rows: int, shared: bool, forward: Forward, device: torch.device
    ) -> None:
        layout = padding.layout(rows, shared=shared)
        self._host = torch.zeros(layout.total, dtype=torch.long, pin_memory=device.type == "cuda")
        self._device = torch.zeros(layout.total, dtype=torch.long, device=device)
        self.arrays = layout.arrays(self._host.numpy())
        views = {name: self._device[where].view(shape) for name, (where, shape) in layout.parts().items()}
        together = Shares(views["starts"], views["members"], views["prefixes"]) if shared else None
        longest = padding.width * padding.block_size
        decodes = Decodes(0, views["tables"], views["lengths"], longest, None, together)
        plan = AttentionPlan(views["slots"], (decodes,), ())
        self._launch: Callable[[], Tensor] = lambda: forward(views["ids"], views["positions"], plan)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden: Tensor | None = None
        nothing = np.zeros(0, dtype=np.int64)
        fill(self.arrays, padding, nothing, nothing, nothing, nothing.reshape(0, 1), nothing)
        if together is not None:
            write_shares((), 1, *(self.arrays[name] for name in ("starts", "members", "prefixes")))
        self._device.copy_(self._host)

    @torch.inference_mode()
    def capture(self, pool: Any) -> None:
        """Kernels are compiled and libraries allocate on the first calls, which a graph may not record."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self._launch()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads pin memory meanwhile, which is none of the graph's business.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._hidden = self._launch()

    def run(self) -> Tensor:
        """(rows, hidden) of what stands in `arrays`, which may change again when the step's tokens are on the host."""
        self._device.copy_(self._host, non_blocking=True)
        if self._graph is None or self._hidden is None:
            return self._launch()
        self._graph.replay()
        return self._hidden
