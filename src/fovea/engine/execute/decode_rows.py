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
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.layers.step import DecoderPlan
from fovea.engine.schedule.decode_batches import (
    DecodeInputs,
    GroupInputs,
    GroupPadding,
    Padding,
    fill,
    first_block,
    of_group,
)
from fovea.engine.schedule.plan import Work
from fovea.kernels import states
from fovea.kernels.attention import AttentionPlan, Decodes, Pieces, PrefixGroups
from fovea.kernels.states import RunTable, StatePlan, Wave

Array = NDArray[np.int64]
ROOM = 64
"""Blocks for which tables have room beyond the longest context when they are made again."""


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
    windows: the sliding window of each KV group; None: it has none.
    """

    def __init__(
        self,
        block_size: int,
        axes: int,
        delta_of: Callable[[str], int],
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self._size = block_size
        self._axes = axes
        self._delta_of = delta_of
        self._windows = windows
        self._tables = [_BlockTables() for _ in windows]
        self._deltas = np.zeros(0, dtype=np.int64)

    def update(self, work: Sequence[Work]) -> DecodeInputs:
        """Return the inputs of a step. work: single tokens of sequences that decode, or drafts of these."""
        places = np.array([item.start for item in work], dtype=np.int64)
        rows = places - np.array([item.seq.dropped for item in work], dtype=np.int64)
        groups = []
        for window, tables in zip(self._windows, self._tables, strict=True):
            windowed = window is not None
            index, offset = np.divmod(places if windowed else rows, self._size)
            before = tables.update([table(item, windowed=windowed) for item in work], index + 1)
            if before is not None and not windowed:
                self._move_deltas(work, before)
            slots = tables.entries[tables.numbers, index] * self._size + offset
            if window is None:
                groups.append(GroupInputs(slots, tables.entries[:, : int(index.max()) + 1], rows + 1))
                continue
            begins = first_block(places, window, self._size)
            lengths = places + 1 - begins * self._size
            groups.append(
                GroupInputs(slots, tables.part(begins, index), lengths, np.maximum(0, lengths - window))
            )
        positions = places + self._deltas
        return DecodeInputs(
            np.array([_token(item) for item in work], dtype=np.int64),
            positions[None].repeat(self._axes, 0) if self._axes else positions,
            tuple(groups),
            _state_slots(work),
        )

    def _move_deltas(self, work: Sequence[Work], before: Array) -> None:
        """Give the rows to other sequences. before: the row in which each was; -1: in none."""
        known = before >= 0
        deltas = np.zeros(len(work), dtype=np.int64)
        deltas[known] = self._deltas[before[known]]
        for row in (~known).nonzero()[0].tolist():
            deltas[row] = self._delta_of(work[row].seq.id)
        self._deltas = deltas


class _BlockTables:
    """The block tables of the latest step's rows in one KV group.

    A sequence has one list of blocks as long as it runs, to which blocks are only added. So two rows have
    equal tables if they have the same list. Blocks behind a window leave the list, but no row reads them.

    entries: (B, blocks) the tables; numbers: (B,) the numbers of the rows.
    """

    def __init__(self) -> None:
        self._blocks: list[list[int]] = []
        self._filled: Array = np.zeros(0, dtype=np.int64)
        self.numbers: Array = np.zeros(0, dtype=np.int64)
        self.entries: Array = np.zeros((0, 0), dtype=np.int64)

    def update(self, blocks: list[list[int]], needed: Array) -> Array | None:
        """Write what is missing of the rows' tables.

        blocks: list of blocks of each row. needed: (B,) how many of them a row reads.
        Returns the row in which each of them was, -1 for none; None: all are where they were.
        """
        before = None
        if len(blocks) != len(self._blocks) or not all(map(is_, blocks, self._blocks)):
            before = self._move(blocks)
        self._fill(needed)
        return before

    def part(self, begins: Array, last: Array) -> Array:
        """Return the tables from block `begins` to block `last` of each row, (B, blocks of the longest)."""
        columns = begins[:, None] + np.arange(int((last - begins).max()) + 1)
        columns = np.minimum(columns, self.entries.shape[1] - 1)
        part: Array = np.maximum(self.entries[self.numbers[:, None], columns], 0)  # no row sees GONE blocks
        return part

    def _move(self, blocks: list[list[int]]) -> Array:
        """Give the rows to other sequences, and keep the tables of sequences that stay."""
        rows = {id(blocks): row for row, blocks in enumerate(self._blocks)}
        before = np.array([rows.get(id(each), -1) for each in blocks])
        known = before >= 0
        filled = np.zeros(len(blocks), dtype=np.int64)
        filled[known] = self._filled[before[known]]
        width = int(filled.max())
        entries = np.zeros((len(blocks), width + ROOM), dtype=np.int64)
        entries[known, :width] = self.entries[before[known], :width]
        self._blocks, self.entries, self._filled = blocks, entries, filled
        self.numbers = np.arange(len(blocks))
        return before

    def _fill(self, needed: Array) -> None:
        """Write the blocks that rows have got since they were written last. needed: entries of each row."""
        missing = (self._filled < needed).nonzero()[0].tolist()
        if not missing:
            return
        width = int(needed.max())
        if width > self.entries.shape[1]:
            self.entries = np.pad(self.entries, ((0, 0), (0, width + ROOM - self.entries.shape[1])))
        for row in missing:
            begin, end = self._filled[row], needed[row]
            self.entries[row, begin:end] = self._blocks[row][begin:end]
        self._filled[missing] = needed[missing]


def _state_slots(work: Sequence[Work]) -> Array | None:
    """Return the slots of each row's state before and after its token, see `DecodeInputs`."""
    pairs = []
    for item in work:
        if item.state is None or item.seq.drafts or len(item.state.saves) != 1:
            return None
        pairs.append((item.state.source, item.state.saves[0][1]))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def table(item: Work, *, windowed: bool = False) -> list[int]:
    """Return the block table of a sequence. windowed: that of layers with a sliding window."""
    return item.seq.window_blocks if windowed else item.seq.blocks


def _token(item: Work) -> int:
    """Return the token that a step's row computes: the newest of the answer, or a draft after it.

    0: the token is still on the device.
    """
    seq = item.seq
    ahead = item.start - seq.length
    if ahead < 0:
        return seq.output_ids[-1]
    return seq.drafts[ahead] if seq.drafts else 0


Forward = Callable[[Tensor, Tensor, DecoderPlan], tuple[Tensor, Tensor | None]]
"""Computes hidden states (T, hidden) from ids (T,), positions and the plan of a step, and what taps read."""
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

    def run(
        self, rows: int, decodes: DecodeInputs, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states of a decode step, (B, hidden), and what taps read.

        They are valid until the next call.

        rows: size of the batch, from `padding.batch`.
        ids: (B,), the tokens on the device; None: those of `decodes`.
        """
        prefixes = self.padding.prefix_groups(decodes)
        batch = self._batches[rows, bool(prefixes)]
        fill(batch.arrays, self.padding, decodes, prefixes)
        hidden, tapped = batch.run(ids)
        count = len(decodes.ids)
        return hidden[:count], None if tapped is None else tapped[:count]


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
        attention = tuple(
            _plan(of_group(views, number), group, padding.block_size)
            for number, group in enumerate(padding.groups)
        )
        plan = DecoderPlan(attention, None if padding.scrap_state is None else _state_plan(views))
        self._launch: Callable[[], tuple[Tensor, Tensor | None]] = partial(
            forward, views["ids"], views["positions"], plan
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: tuple[Tensor, Tensor | None] | None = None
        fill(self.arrays, padding, _nothing(padding))
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
            self._results = self._launch()

    def run(self, ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the results for the inputs in `arrays`, which may change again at once.

        ids: tokens of the first rows, in place of those in `arrays`.
        """
        # The copy to the device may still be queued when the next step fills its inputs. So two buffers take
        # turns: at most two steps are launched before the tokens of the older one are read.
        staged = self._staged[0]
        self._staged.reverse()
        staged.copy_(self._host)
        self._device.copy_(staged, non_blocking=True)
        if ids is not None:
            self._ids[: len(ids)].copy_(ids)
        if self._graph is None or self._results is None:
            return self._launch()
        self._graph.replay()
        return self._results


def _plan(views: dict[str, Tensor], group: GroupPadding, block_size: int) -> AttentionPlan:
    """Return the plan of one KV group in a batch, whose numbers are read on the device."""
    shared = pieces = None
    if "members" in views:
        shared = PrefixGroups(views["starts"], views["members"], views["prefixes"])
    longest = group.width * block_size
    if group.cutting is not None:
        room = group.cutting.room(len(views["slots"]), longest, shared=shared is not None)
        pieces = Pieces.of(views, group.cutting, room)
    decodes = Decodes(
        0, views["tables"], views["lengths"], longest, None, shared, views.get("firsts"),
        pieces,
    )  # fmt: skip
    return AttentionPlan(views["slots"], (decodes,), ())


def _state_plan(views: dict[str, Tensor]) -> StatePlan:
    """Return the plan of layers with a state in a batch, whose slots are read where the batch is."""
    table = RunTable(views["state_starts"], views["state_runs"], views["state_saves"])
    decodes = states.Decodes(table.runs[:, 0], table.runs[:, 2], table.saves[:, 1])
    return StatePlan((Wave(decodes, ()),), table)


def _nothing(padding: Padding) -> DecodeInputs:
    """Return the inputs of a step without rows."""
    none = np.zeros(0, dtype=np.int64)
    groups = (
        GroupInputs(none, none.reshape(0, 1), none, none if group.windowed else None)
        for group in padding.groups
    )
    return DecodeInputs(none, none, tuple(groups), none.reshape(0, 2))
