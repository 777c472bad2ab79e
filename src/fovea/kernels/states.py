"""Layers with a state: which rows of a step belong together, and which slots their states are in.

A layer with a state keeps a fixed number of values per sequence, whatever its length. The states of all
sequences are in slots of one pool. A step reads a sequence's state from a slot and writes it to one, usually
the same. It can also write copies on the way: checkpoints, from which another sequence with the same first
tokens continues later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fovea.kernels import NO_SLOT
from fovea.kernels.transfer import to_device


@dataclass(frozen=True, slots=True)
class StateRun:
    """Consecutive tokens of one sequence in a step.

    row: the step's row of the first token. The others follow it.
    count: number of tokens.
    source: slot of the state before the first token; NO_SLOT: the state is zero.
    saves: (tokens, slot): after so many of these tokens the state is written to that slot. Ascending.
    """

    row: int
    count: int
    source: int
    saves: tuple[tuple[int, int], ...]

    def segments(self) -> Iterator[tuple[slice, tuple[int, ...]]]:
        """Cut the run after every save.

        Yields the rows of each segment, and the slots to which the state after it is written.
        """
        ends = sorted({0, self.count, *(tokens for tokens, _ in self.saves)})
        for first, last in pairwise(ends):
            slots = tuple(slot for tokens, slot in self.saves if tokens == last)
            yield slice(self.row + first, self.row + last), slots


@dataclass(frozen=True, slots=True)
class Decodes:
    """B single tokens of different sequences.

    rows: (B,) rows of the step.
    sources, targets: (B,) slots of the states before and after each token.
    """

    rows: Tensor
    sources: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class Wave:
    """Runs of different sequences, which can be computed in any order.

    decodes: runs of a single token, together; None: there are none.
    runs: the other runs.
    """

    decodes: Decodes | None
    runs: tuple[StateRun, ...]


@dataclass(frozen=True, slots=True)
class RunTable:
    """All runs of a step as int64 arrays on the CPU.

    starts: (sequences + 1,), the number of each sequence's first run.
    runs: (runs, 5): row, count, source, number of the first save, and of the save after the last.
    saves: (saves, 2): tokens after which the state is written, and slot.
    """

    starts: Tensor
    runs: Tensor
    saves: Tensor


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The work of layers with a state in one step.

    waves: computed one after the other, because a run may read what a run of an earlier wave wrote.
    table: the same runs as numbers, for kernels that compute all of them in one call.
    """

    waves: tuple[Wave, ...]
    table: RunTable


def state_plan(sequences: list[list[StateRun]], device: torch.device) -> StatePlan:
    """Return the plan of a step. sequences: the runs of each sequence, in order of their tokens."""
    waves = []
    for number in range(max((len(runs) for runs in sequences), default=0)):
        wave = [runs[number] for runs in sequences if number < len(runs)]
        waves.append(_wave(wave, device))
    return StatePlan(tuple(waves), _table(sequences))


def _wave(runs: list[StateRun], device: torch.device) -> Wave:
    singles = [run for run in runs if run.count == 1 and run.source != NO_SLOT and len(run.saves) == 1]
    decodes = None
    if singles:
        numbers = np.array([(run.row, run.source, run.saves[0][1]) for run in singles], dtype=np.int64)
        decodes = Decodes(*to_device(torch.from_numpy(np.ascontiguousarray(numbers.T)), device).unbind(0))
    together = set(map(id, singles))
    return Wave(decodes, tuple(run for run in runs if id(run) not in together))


def _table(sequences: list[list[StateRun]]) -> RunTable:
    starts = [0]
    runs: list[tuple[int, int, int, int, int]] = []
    saves: list[tuple[int, int]] = []
    for sequence in sequences:
        for run in sequence:
            runs.append((run.row, run.count, run.source, len(saves), len(saves) + len(run.saves)))
            saves.extend(run.saves)
        starts.append(len(runs))
    return RunTable(
        torch.tensor(starts, dtype=torch.long),
        torch.tensor(runs, dtype=torch.long).view(-1, 5),
        torch.tensor(saves, dtype=torch.long).view(-1, 2),
    )
