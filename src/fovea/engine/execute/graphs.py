"""Decode steps in batches of fixed sizes, recorded once as CUDA graphs and replayed with one launch.

`schedule.padding` defines the layout of the inputs. A batch without a graph runs the same launches on the
same memory one by one, on any device. This is how the padding is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fovea.engine.execute.decode_rows import DecodeInputs
from fovea.engine.schedule.padding import Padding, fill
from fovea.engine.schedule.shares import find_shares, write_shares
from fovea.kernels.attention import AttentionPlan, Decodes, Shares

Forward = Callable[[Tensor, Tensor, AttentionPlan], Tensor]
"""Computes hidden states (T, hidden) from ids (T,), positions and an attention plan."""
WARM_UPS = 2


class PaddedDecodes:
    """Decode batches of every padded size; all use one KV pool.

    padding: sizes and layout of the batches.
    forward: runs the decoder.
    capture: whether each batch is recorded as a CUDA graph, now.
    """

    def __init__(self, padding: Padding, forward: Forward, device: torch.device, *, capture: bool) -> None:
        self.padding = padding
        self._batches = {key: _Batch(padding, *key, forward, device) for key in padding.batches()}
        if capture:
            # The graphs share one memory pool, because no two run at once. The largest size is recorded
            # first.
            pool = torch.cuda.graph_pool_handle()
            for batch in self._batches.values():
                batch.capture(pool)

    def run(self, rows: int, decodes: DecodeInputs) -> Tensor:
        """Return the hidden states of a decode step, (B, hidden). They are valid until the next call.

        rows: size of the batch, from `padding.size`.
        """
        padding, size = self.padding, self.padding.block_size
        tables, lengths = decodes.tables, decodes.lengths
        groups = find_shares(tables, lengths, size, padding.shared_rows, least_rows=padding.least_rows)
        batch = self._batches[rows, bool(groups)]
        fill(batch.arrays, padding, *decodes)
        if groups:
            write_shares(groups, size, *(batch.arrays[name] for name in ("starts", "members", "prefixes")))
        return batch.run()[: len(lengths)]


class _Batch:
    """The memory of one batch size, on the host and on the device, and the launches that use it."""

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
        """Record the launches as a CUDA graph, after warm-up runs.

        On the first runs kernels are compiled and libraries allocate memory, which a graph must not record.
        """
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self._launch()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may pin memory meanwhile. This mode keeps their calls from invalidating the graph.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._hidden = self._launch()

    def run(self) -> Tensor:
        """Return the hidden states (rows, hidden) of the inputs in `arrays`.

        `arrays` may change again when the step's tokens are on the host.
        """
        self._device.copy_(self._host, non_blocking=True)
        if self._graph is None or self._hidden is None:
            return self._launch()
        self._graph.replay()
        return self._hidden
