"""The inputs of steps that only decode, as arrays that stay from one step to the next.

From step to step most rows of a batch are the same sequences, one token longer. So block tables are not
written again: a row gets an entry when its sequence gets a block. Everything else follows from the places of
the tokens, by a few operations on all rows at once. When sequences join or leave, the rows of the others
move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fovea.engine.schedule.plan import Work

Array = NDArray[np.int64]
ROOM = 64
"""Blocks for which tables have room beyond the longest context when they are made anew."""


class DecodeInputs(NamedTuple):
    """The inputs of one step. They are valid until the next one.

    ids: (B,) token ids.
    positions: (B,), or (3, B) with M-RoPE.
    slots: (B,) KV slots that the tokens are written to.
    tables: (B, blocks of the longest context) block tables. Entries behind a row's context mean nothing, but
        are numbers of blocks.
    lengths: (B,) context lengths, the new token included.
    """

    ids: Array
    positions: Array
    slots: Array
    tables: Array
    lengths: Array


def only_decodes(work: Sequence[Work]) -> bool:
    """Whether a step computes nothing but newest tokens of answers, and drafts behind them.

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
    """Return the token that a step's row computes: the newest of the answer, or a draft behind it."""
    seq = item.seq
    ahead = item.start - seq.length
    return seq.output_ids[-1] if ahead < 0 else seq.drafts[ahead]
