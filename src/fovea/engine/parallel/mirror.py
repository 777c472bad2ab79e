"""A worker's side of the operations that the driver announces.

A worker has a share of the decoder's layers and of its memory. It has no scheduler, no tokenizer and no
tower: everything that an operation needs is in its announcement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fovea.engine.execute.block_moves import BlockMoves, move_streams
from fovea.engine.execute.kept_rows import Decision, KeptRows, Watch
from fovea.engine.kv.manager import Compaction, Move
from fovea.engine.layers.step import DecoderMemory, Step
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.parallel.group import Group
from fovea.engine.parallel.messages import ENGINE, unpack
from fovea.engine.reduce.prompt_run import LastRows, first_keys, last_attention
from fovea.kernels.pages import KVFormat


class Mirror:
    """Carries out announced operations with the share of a worker."""

    def __init__(self, model: VisionLanguageModel, group: Group, device: torch.device) -> None:
        self._decoder, self._head = model.decoder, model.head
        self._group, self._device = group, device
        self._memories: dict[int, DecoderMemory] = {}
        self._kept: KeptRows
        self._moves: BlockMoves
        self._watch: Watch | None = None
        self._operations: dict[str, Callable[..., None]] = {
            "allocate": self._allocate,
            "forward": self._forward,
            "logits": self._logits,
            "move": self._move,
            "choose": self._choose,
            "forget": self._forget,
            "open_run": self._open_run,
            "run_layer": self._run_layer,
            "attend": self._attend,
            "keys": self._keys,
        }

    @torch.inference_mode()
    def run(self) -> None:
        """Carry out operations until the driver announces the end."""
        while True:
            name, args = unpack(self._group.receive(), self._device, self._memories.__getitem__)
            if name == "end":
                return
            self._operations[name](*args)

    def _allocate(
        self,
        pools: tuple[int, ...],
        block_size: int,
        slots: int,
        dtype: torch.dtype,
        kv_format: KVFormat | None,
        host_blocks: int,
    ) -> None:
        """Allocate this share of an engine's memory. Earlier memory is freed before."""
        self._memories.clear()
        self.__dict__.pop("_kept", None)
        self.__dict__.pop("_moves", None)
        config = self._decoder.config
        memory = DecoderMemory.allocate(config, pools, block_size, slots, dtype, self._device, kv_format)
        self._memories[ENGINE] = memory
        self._kept = KeptRows(config, memory, self._group)
        self._moves = BlockMoves(memory.kv, host_blocks, move_streams(self._device), self._kept.compact)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._watch = next((each for each in (*args, *kwargs.values()) if isinstance(each, Watch)), None)
        self._decoder(*args, **kwargs)

    def _logits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._group.grid.stage == 0:
            self._head(*args, **kwargs)

    def _move(self, moves: tuple[Move | Compaction, ...]) -> None:
        self._moves.run(moves)

    def _choose(self, made: list[Decision]) -> None:
        self._kept.choose(made, self._watch)
        self._watch = None

    def _forget(self, sequence_id: str) -> None:
        self._kept.forget(sequence_id)

    def _open_run(
        self, number: int, closed: list[int], shape: tuple[tuple[int, ...], int, int, torch.dtype]
    ) -> None:
        """Allocate memory for a run of prompts beside the engine's, and free that of earlier ones."""
        for each in closed:
            self._memories.pop(each, None)
        pools, block_size, slots, dtype = shape
        config, device = self._decoder.config, self._device
        self._memories[number] = DecoderMemory.allocate(config, pools, block_size, slots, dtype, device)

    def _run_layer(self, x: Tensor, layer: int, step: Step) -> None:
        self._decoder.run(x, layer, layer + 1, step)

    def _attend(self, x: Tensor, layer: int, step: Step, rows: LastRows) -> None:
        last_attention(self._decoder, self._group, x, layer, step, rows)

    def _keys(self, layer: int, step: Step, table: Tensor, length: int) -> None:
        first_keys(self._group, layer, step, table, length)
