"""Plans a step for the decoder: KV slots of its rows, blocks that several rows read together, and states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.layers.config import DecoderConfig
from fovea.engine.layers.step import DecoderPlan
from fovea.engine.schedule.plan import Work
from fovea.engine.schedule.shares import find_shares, write_shares
from fovea.kernels.attention import AttentionPlan, Chunk, Decodes, Shares
from fovea.kernels.base import Kernels
from fovea.kernels.states import StatePlan, StateRun, state_plan

PADDING_RATIO, PADDING_SLACK = 2, 64
"""Limits of a group of decodes that share a padded length: ratio of their contexts, and extra tokens."""


class DecoderPlanner:
    """Turns the work of a step into the inputs of the layers that exchange information between rows.

    kernels: the kernels in use.
    config: shape of the decoder.
    block_size: tokens per KV block.
    device, dtype: of the tensors.
    """

    def __init__(
        self,
        kernels: Kernels,
        config: DecoderConfig,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._block_size, self._device, self._dtype = block_size, device, dtype
        heads = config.attention_heads
        self._stateful = config.stateful
        self._in_place = kernels.attends_in_place(heads.dim)
        self._shared_rows = kernels.shared_rows(heads.query // heads.kv)
        self._least_rows = kernels.least_shared_rows

    def plan(self, work: Sequence[Work]) -> DecoderPlan:
        """Return the plan of a step. work: single tokens first, as `by_length` sorts them."""
        return DecoderPlan((self._attention(work),), self._states(work) if self._stateful else None)

    def _states(self, work: Sequence[Work]) -> StatePlan:
        """The runs of each sequence: its known tokens, and then its drafts one by one."""
        sequences: dict[str, list[tuple[int, StateRun]]] = {}
        row = 0
        for item in work:
            state = item.state
            assert state is not None
            saves = tuple((position - item.start, slot) for position, slot in state.saves)
            run = StateRun(row, item.count, state.source, saves)
            sequences.setdefault(item.seq.id, []).append((item.start, run))
            row += item.count
        runs = [[run for _, run in sorted(parts, key=_first)] for parts in sequences.values()]
        return state_plan(runs, self._device)

    def _attention(self, work: Sequence[Work]) -> AttentionPlan:
        singles = next((i for i, item in enumerate(work) if item.count != 1), len(work))
        chunks, row = [], singles
        for item in work[singles:]:
            used = -(-item.stop // self._block_size)
            chunks.append(Chunk(row, item.count, item.start, self._tensor(np.array(item.seq.blocks[:used]))))
            row += item.count
        return AttentionPlan(
            self._tensor(slots(work, self._block_size)), self._groups(work[:singles]), tuple(chunks)
        )

    def _groups(self, singles: Sequence[Work]) -> tuple[Decodes, ...]:
        if not self._in_place:
            groups, first = [], 0
            for group in group_by_length(singles):
                groups.append(self._decodes(group, first))
                first += len(group)
            return tuple(groups)
        return (self._decodes(singles, 0),) if singles else ()

    def _decodes(self, work: Sequence[Work], row: int) -> Decodes:
        lengths = np.array([item.stop for item in work])
        longest = int(lengths.max())
        tables = np.zeros((len(work), -(-longest // self._block_size)), dtype=np.int64)
        fill_tables(tables, work, self._block_size)
        mask = None
        if not self._in_place and (lengths != longest).any():
            allowed = torch.from_numpy(np.arange(longest)[None, :] < lengths[:, None])
            mask = torch.zeros(allowed.shape, dtype=self._dtype)
            mask = mask.masked_fill_(~allowed, float("-inf"))[:, None, None].to(self._device)
        shared = self._shares(tables, lengths) if self._shared_rows else None
        return Decodes(row, self._tensor(tables), self._tensor(lengths), longest, mask, shared)

    def _shares(self, tables: NDArray[np.int64], lengths: NDArray[np.int64]) -> Shares | None:
        groups = find_shares(
            tables, lengths, self._block_size, self._shared_rows, least_rows=self._least_rows
        )
        if not groups:
            return None
        starts = np.empty(len(tables), dtype=np.int64)
        members = np.empty((len(groups), self._shared_rows), dtype=np.int64)
        prefixes = np.empty(len(groups), dtype=np.int64)
        write_shares(groups, self._block_size, starts, members, prefixes)
        return Shares(self._tensor(starts), self._tensor(members), self._tensor(prefixes))

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _first(part: tuple[int, StateRun]) -> int:
    return part[0]


def slots(work: Sequence[Work], block_size: int) -> NDArray[np.int64]:
    """Return the KV slot of each row of the step: block * block_size + offset."""
    parts = []
    for item in work:
        blocks = np.asarray(item.seq.blocks, dtype=np.int64)
        places = np.arange(item.start, item.stop)
        parts.append(blocks[places // block_size] * block_size + places % block_size)
    return np.concatenate(parts)


def fill_tables(tables: NDArray[np.int64], work: Sequence[Work], block_size: int) -> None:
    """Write each sequence's blocks into its row of `tables`, (sequences, blocks). Other entries stay."""
    for number, item in enumerate(work):
        used = -(-item.stop // block_size)
        tables[number, :used] = item.seq.blocks[:used]


def by_length(work: Sequence[Work]) -> list[Work]:
    """Sort the work as `group_by_length` needs it: single tokens first, from short contexts to long ones."""
    return sorted(work, key=lambda item: (item.count != 1, item.stop if item.count == 1 else 0))


def group_by_length(work: Sequence[Work]) -> list[list[Work]]:
    """Split sorted single tokens into groups of similar context length.

    A padded position costs as much as a real key, so the lengths of a group should not differ much. The
    longest context of a group is at most PADDING_RATIO times the shortest, plus PADDING_SLACK.
    """
    groups: list[list[Work]] = []
    for item in work:
        if groups and item.stop <= PADDING_RATIO * groups[-1][0].stop + PADDING_SLACK:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups
