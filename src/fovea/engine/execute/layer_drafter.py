"""Drafts by a trained layer that reads the target's states (`layers.draft`).

The layer's keys and values lie in a pool of their own, in blocks with the numbers of the target's, which are
copied with them. So a prefix that the prefix cache has is there for the layer, too. Its last row was computed
with the token that followed in the earlier text, and rows are missing of a sequence that ended before they
were computed. What is missing or wrong in the layer's memory makes drafts worse, and never an answer.

A prompt's rows are computed with the second token of its answer, so that the first one is not later.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.engine.execute.attention_plan import DecoderPlanner, by_length, slots
from fovea.engine.execute.block_moves import BlockMoves, move_streams
from fovea.engine.job import SequenceInputs
from fovea.engine.kv.manager import Compaction, Move
from fovea.engine.layers.draft import DraftLayer
from fovea.engine.layers.step import DecoderMemory, Step
from fovea.engine.schedule.plan import Work
from fovea.engine.sequence import Sequence, Status
from fovea.engine.speculate.speculator import DraftRequest
from fovea.engine.speculate.texts import Continuation
from fovea.kernels.transfer import row_index, to_device

MOST_WAITING = 8192
"""Rows of a sequence that wait to be computed. A sequence with more gets no drafts of the layer."""
MOST_PARTS = 64
"""Parts of them after which these are joined."""
MOST_ROWS = 1024
"""Waiting rows that are computed in one step. A longer prompt gets no drafts until its last step."""
LEAST_CHANCE = 0.3
"""A draft that is right less often does not get a successor, which would cost another pass."""

RUNNING = Status.RUNNING
Positions = Callable[[Sequence, int, int], NDArray[np.int64]]
"""Returns the positions of a sequence's tokens in [start, stop): (3, count) with M-RoPE, else (count,)."""


@dataclass(slots=True)
class _Waiting:
    """The rows of one sequence that are not computed yet.

    seq: the sequence.
    start: place of the first one.
    parts: the target's states, (rows, n) each, one after the other. count: number of rows.
    lost: some rows are missing, so the sequence gets no drafts.
    """

    seq: Sequence
    start: int = 0
    parts: list[Tensor] = field(default_factory=list)
    count: int = 0
    lost: bool = False

    def lose(self) -> None:
        self.lost, self.parts, self.count = True, [], 0

    def add(self, start: int, part: Tensor) -> None:
        """Add rows. After a preemption, some are there a second time, or all begin anew."""
        if not self.parts or not self.start < start <= self.start + self.count:
            self.start, self.parts, self.count = start, [], 0
        elif start < self.start + self.count:
            # The rows before may be in the prefix cache of the target, and not in the layer's memory.
            self.count = start - self.start
            self.parts = [torch.cat(self.parts)[: self.count]]
        self.parts.append(part)
        self.count += len(part)
        if len(self.parts) > MOST_PARTS:
            self.parts = [torch.cat(self.parts)]
        if self.count > MOST_WAITING:
            self.lose()

    def take(self, stop: int) -> tuple[Work, Tensor]:
        """Return the rows before place `stop`, which is after the first one, and forget them."""
        start, rows = self.start, self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        count = min(len(rows), stop - start)
        self.start, self.parts = start + count, [rows[count:]] if count < len(rows) else []
        self.count = len(rows) - count
        return Work(self.seq, start, count), rows[:count]


class LayerDrafter:
    """A computed drafter, see `speculator.DeviceDrafter`.

    layer: the trained layer.
    least_chance: see LEAST_CHANCE.
    """

    name = "layer"
    least_chance = LEAST_CHANCE

    def __init__(
        self, layer: DraftLayer, blocks: int, block_size: int, positions: Positions, host_blocks: int = 0
    ) -> None:
        """blocks, block_size: size of the target's KV pool. host_blocks: its blocks in host memory."""
        target = layer.target
        self.layer = layer
        self._size, self._positions = block_size, positions
        device, dtype = target.device, target.dtype
        self._planner = DecoderPlanner(target.kernels, layer.config, block_size, device, dtype)
        self._memory = DecoderMemory.allocate(layer.config, (blocks,), block_size, 0, dtype, device)
        self._moves = BlockMoves(self._memory.kv, host_blocks, move_streams(device))
        kv = self._memory.layer_kv(0)
        assert isinstance(kv, Tensor)
        self._kv = kv.view(-1, *kv.shape[2:])
        self._waiting: dict[str, _Waiting] = {}
        self._resting = False

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        if seq.keep is None:  # otherwise rows would have to move with those of the target
            self._waiting[seq.id] = _Waiting(seq, lost=self.resting)

    @property
    def resting(self) -> bool:
        """See `speculator.DeviceDrafter`. While it rests it takes in no states."""
        return self._resting

    @resting.setter
    def resting(self, value: bool) -> None:
        if value and not self._resting:
            for waiting in self._waiting.values():
                waiting.lose()
        elif self._resting and not value:
            self._kv.zero_()  # what was computed meanwhile was not noted
        self._resting = value

    def remove(self, seq: Sequence) -> None:
        self._waiting.pop(seq.id, None)

    def move(self, moves: Seq[Move | Compaction]) -> None:
        """Carry out the moves of the target's blocks, before its step.

        Rows of blocks that are copied, and that wait, are computed before.
        """
        own = [move for move in moves if isinstance(move, Move) and not move.windowed]
        read = {move.source for move in own if move.kind != "load"}
        behind = [
            waiting
            for waiting in self._waiting.values()
            if waiting.parts
            and waiting.start < waiting.seq.length - 1
            and read.intersection(waiting.seq.blocks[waiting.start // self._size :])
        ]
        if behind:
            self._compute_waiting([(each, ()) for each in behind])
        self._moves.run(own)

    def note(self, work: Seq[Work], states: Tensor, new: dict[str, list[int]], *, keep: bool) -> None:
        """Take in the target's states of a step.

        work: its rows. states: (rows, n), at the taps. new: tokens that the sequences have got.
        keep: drafts are worthwhile. Otherwise these sequences get none from now on: states take memory.
        """
        # On CUDA a sequence may have ended while its step was computed; its blocks are gone.
        placed = [each for each in sorted_rows(work) if each.work.seq.status is RUNNING]
        if not placed:
            return
        # Blocks are used again. A row that is never computed must not show an earlier sequence's keys.
        rows = slots([each.work for each in placed], self._size)
        self._kv.index_fill_(0, to_device(torch.from_numpy(rows), self._kv.device), 0)
        for item in placed:
            waiting = self._waiting.get(item.work.seq.id)
            if waiting is not None and not waiting.lost:
                if not keep:
                    waiting.lose()
                    continue
                seq = item.work.seq
                # The row of a token needs the one after it, and refused drafts are no tokens. A sequence
                # without a new token may get it late, and then its drafts with the one after it.
                known = seq.length + max(len(new.get(seq.id, ())), 1) - 1
                count = min(item.work.count, known - item.work.start)
                if count > 0:
                    part = states[item.row : item.row + count]
                    waiting.add(item.work.start, part.clone() if count < len(states) else part)

    @torch.inference_mode()
    def draft(self, asked: Seq[DraftRequest], most: int) -> dict[str, Continuation]:
        """Return up to `most` drafts of each sequence, by its id.

        Sequences whose first token is new get none yet.
        """
        rows: list[DraftRequest] = []
        room = MOST_ROWS
        for each in asked:
            waiting = self._waiting.get(each.seq.id)
            if waiting is None or not waiting.count or not each.seq.output_ids or room <= 0:
                continue
            if waiting.count <= room:
                rows.append(each)
            else:  # the rest of a long prompt follows with the next tokens
                self._compute_waiting([(waiting, each.new)], room)
            room -= waiting.count
        found = {each.seq.id: Continuation([], [], 0) for each in rows}
        if rows:
            self._chain(rows, found, most)
        return found

    def _chain(self, rows: list[DraftRequest], found: dict[str, Continuation], most: int) -> None:
        """Compute the waiting rows, and then one row for each further draft."""
        work, outputs = self._compute_waiting([(self._waiting[each.seq.id], each.new) for each in rows])
        ends = np.cumsum([item.count for item in work]) - 1
        alive = {item.seq.id: 1.0 for item in work}
        outputs = outputs[row_index(ends.tolist(), outputs.device)]
        while True:
            tokens, chances = (values.tolist() for values in self.layer.expect(outputs))
            going_on: list[tuple[int, Work, int]] = []
            for row, (item, token, chance) in enumerate(zip(work, tokens, chances, strict=True)):
                name = item.seq.id
                drafts = found[name]
                drafts.tokens.append(token)
                drafts.shares.append(chance)
                alive[name] *= chance
                fits = item.stop < len(item.seq.blocks) * self._size
                if len(drafts.tokens) < most and alive[name] >= self.least_chance and fits:
                    going_on.append((row, Work(item.seq, item.stop, 1), token))
            if not going_on:
                return
            # The order by length stays: each context is longer by one.
            work = [item for _, item, _ in going_on]
            outputs = outputs[row_index([row for row, _, _ in going_on], outputs.device)]
            outputs = self._compute(work, np.array([token for _, _, token in going_on]), outputs)

    def _compute_waiting(
        self, waiting: Seq[tuple[_Waiting, Seq[int]]], most: int = MOST_WAITING
    ) -> tuple[list[Work], Tensor]:
        """Compute the rows of some sequences that wait, and whose next token is known.

        waiting: rows, and tokens that the sequence has just got. most: most rows of each.
        Returns the work, and the rows' outputs.
        """
        new = {each.seq.id: tokens for each, tokens in waiting}
        taken = [
            each.take(min(each.start + most, each.seq.length + len(tokens) - 1)) for each, tokens in waiting
        ]
        states = {work.seq.id: rows for work, rows in taken}
        work = by_length([item for item, _ in taken])
        ids = [_tokens(item.seq, new[item.seq.id], item.start + 1, item.stop + 1) for item in work]
        fused = self.layer.fuse(torch.cat([states[item.seq.id] for item in work]))
        return work, self._compute(work, np.concatenate(ids), fused)

    def _compute(self, work: list[Work], ids: NDArray[np.int64], states: Tensor) -> Tensor:
        device = states.device
        positions = np.concatenate([self._positions(w.seq, w.start, w.stop) for w in work], axis=-1)
        angles = self.layer.angles(to_device(torch.from_numpy(positions), device), states.dtype)
        step = Step(angles, self._planner.plan(work), self._memory)
        embeds = self.layer.embed(to_device(torch.from_numpy(ids), device))
        return self.layer(embeds, states, step)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Placed:
    row: int
    work: Work


def sorted_rows(work: Seq[Work]) -> list[_Placed]:
    """Return the work of a step with the number of its first row, each sequence's in the order of places."""
    placed, row = [], 0
    for item in work:
        placed.append(_Placed(row, item))
        row += item.count
    return sorted(placed, key=lambda each: each.work.start)


def _tokens(seq: Sequence, new: Seq[int], start: int, stop: int) -> NDArray[np.int64]:
    """Token ids in [start, stop) of prompt, answer and new tokens. No drafts."""
    prompt = len(seq.prompt_ids)
    later = [*seq.output_ids, *new]
    if start >= prompt:
        return np.array(later[start - prompt : stop - prompt], dtype=np.int64)
    return np.array([*seq.prompt_ids[start:stop], *later[: max(0, stop - prompt)]], dtype=np.int64)
