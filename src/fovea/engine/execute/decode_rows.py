"""Steps that only decode: their inputs as arrays that stay from step to step, and batches of fixed sizes.

From step to step most rows of a batch are the same sequences, one token longer. So block tables are not
written again: a row gets an entry when its sequence gets a block. Everything else follows from the places of
the tokens, by a few operations on all rows at once. When sequences join or leave, the rows of the others
move.

Batches of fixed sizes are recorded once as CUDA graphs and replayed with one launch.
`schedule.decode_batches` defines the layout of the inputs. A batch without a graph runs the same launches on
the same memory one by one, on any device. This is how the padding is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.schedule.decode_batches import Padding, fill, find_prefix_groups, write_prefix_groups
from fovea.engine.schedule.plan import Work
from fovea.kernels.attention import AttentionPlan, Decodes, PrefixGroups

Array = NDArray[np.int64]
ROOM = 64
"""Blocks for which tables have room beyond the longest context when they are made again."""


class DecodeInputs(NamedTuple):
    """The inputs of one step. They are valid until the next one.

    ids: (B,) token ids.
    positions: (B,), or (3, B) with M-RoPE.
    slots: (B,) KV slots that the tokens are written to.
    tables: (B, blocks of the longest context) block tables. Entries after a row's context mean nothing, but
        are numbers of blocks.
    lengths: (B,) context lengths, the new token included.
    """

    ids: Array
    positions: Array
    slots: Array
    tables: Array
    lengths: Array


def only_decodes(work: Sequence[Work]) -> bool:
    """Whether a step computes nothing but newest tokens of answers, and drafts after them.

    The last prompt token does not count as a decode, because it may be a visual token.
    """
    return all(item.count == 1 and item.seq.decoding for item in work)


class DecodeRows:
    """The rows of the latest step.

    block_size: tokens per KV block.
    axes: coordinates of a position (M-RoPE); 0 for plain positions.
    delta_of: returns the offset from the place of a generated token to its position, by sequence id.
    """

    def __init__(self, block_size: int, axes: int, delta_of: Callable[[str], int]) -> None:
        self._size = block_size
        self._axes = axes
        self._delta_of = delta_of
        # A sequence has one list of blocks as long as it runs, to which blocks are only added. So two rows
        # have equal tables if they have the same list.
        self._blocks: list[list[int]] = []
        self._tables: Array = np.zeros((0, 0), dtype=np.int64)
        self._filled = self._deltas = self._numbers = np.zeros(0, dtype=np.int64)

    def update(self, work: Sequence[Work]) -> DecodeInputs:
        """Return the inputs of a step. work: single tokens of sequences that decode, or drafts of these."""
        blocks = [item.seq.blocks for item in work]
        if len(blocks) != len(self._blocks) or not all(map(is_, blocks, self._blocks)):
            self._move(work, blocks)
        places = np.array([item.start for item in work], dtype=np.int64)
        index, offset = np.divmod(places, self._size)
        self._fill(index + 1)
        positions = places + self._deltas
        return DecodeInputs(
            np.array([_token(item) for item in work], dtype=np.int64),
            positions[None].repeat(self._axes, 0) if self._axes else positions,
            self._tables[self._numbers, index] * self._size + offset,
            self._tables[:, : int(index.max()) + 1],
            places + 1,
        )

    def _move(self, work: Sequence[Work], blocks: list[list[int]]) -> None:
        """Give the rows to other sequences, and keep the tables of sequences that stay."""
        rows = {id(table): row for row, table in enumerate(self._blocks)}
        before = np.array([rows.get(id(table), -1) for table in blocks])
        known = before >= 0
        filled, deltas = np.zeros((2, len(blocks)), dtype=np.int64)
        filled[known] = self._filled[before[known]]
        deltas[known] = self._deltas[before[known]]
        width = int(filled.max())
        tables = np.zeros((len(blocks), width + ROOM), dtype=np.int64)
        tables[known, :width] = self._tables[before[known], :width]
        for row in (~known).nonzero()[0].tolist():
            deltas[row] = self._delta_of(work[row].seq.id)
        self._blocks, self._tables, self._filled, self._deltas = blocks, tables, filled, deltas
        self._numbers = np.arange(len(blocks))

    def _fill(self, needed: Array) -> None:
        """Write the blocks that rows have got since they were written last. needed: entries of each row."""
        missing = (self._filled < needed).nonzero()[0].tolist()
        if not missing:
            return
        width = int(needed.max())
        if width > self._tables.shape[1]:
            self._tables = np.pad(self._tables, ((0, 0), (0, width + ROOM - self._tables.shape[1])))
        for row in missing:
            begin, end = self._filled[row], needed[row]
            self._tables[row, begin:end] = self._blocks[row][begin:end]
        self._filled[missing] = needed[missing]


def _token(item: Work) -> int:
    """Return the token that a step's row computes: the newest of the answer, or a draft after it.

    0: the token is still on the device.
    """
    seq = item.seq
    ahead = item.start - seq.length
    if ahead < 0:
        return seq.output_ids[-1]
    return seq.drafts[ahead] if seq.drafts else 0


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

    def run(self, rows: int, decodes: DecodeInputs, ids: Tensor | None = None) -> Tensor:
        """Return the hidden states of a decode step, (B, hidden). They are valid until the next call.

        rows: size of the batch, from `padding.size`.
        ids: (B,), the tokens on the device; None: those of `decodes`.
        """
        padding, size = self.padding, self.padding.block_size
        tables, lengths = decodes.tables, decodes.lengths
        groups = find_prefix_groups(tables, lengths, size, padding.shared_rows, least_rows=padding.least_rows)
        batch = self._batches[rows, bool(groups)]
        fill(batch.arrays, padding, *decodes)
        if groups:
            write_prefix_groups(
                groups, size, *(batch.arrays[name] for name in ("starts", "members", "prefixes"))
            )
        return batch.run(ids)[: len(lengths)]


class _Batch:
    """The memory of one batch size, on the host and on the device, and the launches that use it."""

    def __init__(
        self, padding: Padding, rows: int, shared: bool, forward: Forward, device: torch.device
    ) -> None:
        layout = padding.layout(rows, shared=shared)
        self._host = torch.zeros(layout.total, dtype=torch.long)
        pinned = device.type == "cuda"
        self._staged = [torch.zeros(layout.total, dtype=torch.long, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros(layout.total, dtype=torch.long, device=device)
        self.arrays = layout.arrays(self._host.numpy())
        views = {name: self._device[where].view(shape) for name, (where, shape) in layout.parts().items()}
        self._ids = views["ids"]
        together = PrefixGroups(views["starts"], views["members"], views["prefixes"]) if shared else None
        longest = padding.width * padding.block_size
        decodes = Decodes(0, views["tables"], views["lengths"], longest, None, together)
        plan = AttentionPlan(views["slots"], (decodes,), ())
        self._launch: Callable[[], Tensor] = lambda: forward(views["ids"], views["positions"], plan)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden: Tensor | None = None
        nothing = np.zeros(0, dtype=np.int64)
        fill(self.arrays, padding, nothing, nothing, nothing, nothing.reshape(0, 1), nothing)
        if together is not None:
            write_prefix_groups((), 1, *(self.arrays[name] for name in ("starts", "members", "prefixes")))
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

    def run(self, ids: Tensor | None = None) -> Tensor:
        """Return the hidden states (rows, hidden) of the inputs in `arrays`, which may change again at once.

        ids: tokens of the first rows, in place of those in `arrays`.
        """
        # The copy may still wait for an earlier step. It reads a buffer of its own until the tokens of its
        # step are on the host, and no more than two steps are launched before that.
        staged = self._staged[0]
        self._staged.reverse()
        staged.copy_(self._host)
        self._device.copy_(staged, non_blocking=True)
        if ids is not None:
            self._ids[: len(ids)].copy_(ids)
        if self._graph is None or self._hidden is None:
            return self._launch()
        self._graph.replay()
        return self._hidden
