"""A worker's side of the operations that the driver announces.

A worker has a share of the decoder's layers and of its memory. It has no scheduler, no tokenizer and no
tower: everything that an operation needs is in its announcement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fovea.engine.execute.block_moves import BlockMoves, move_streams
from fovea.engine.execute.kept_rows import Decision, KeptRows, Watch
from fovea.engine.kv.manager import Compaction, Move
from fovea.engine.layers.step import DecoderMemory
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.parallel.group import Group
from fovea.engine.parallel.messages import unpack
from fovea.kernels.pages import KVFormat


class Mirror:
    """Carries out announced operations with the share of a worker."""

    def __init__(self, model: VisionLanguageModel, group: Group, device: torch.device) -> None:
        self._decoder, self._head = model.decoder, model.head
        self._group, self._device = group, device
        self._memory: DecoderMemory | None = None
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
        }

    @torch.inference_mode()
    def run(self) -> None:
        """Carry out operations until the driver announces the end."""
        while True:
            name, args = unpack(self._group.receive(), self._device, self._own_memory)
            if name == "end":
                return
            self._operations[name](*args)

    def _own_memory(self) -> DecoderMemory:
        assert self._memory is not None
        return self._memory

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
        self._memory = None
        self.__dict__.pop("_kept", None)
        self.__dict__.pop("_moves", None)
        config = self._decoder.config
        memory = DecoderMemory.allocate(config, pools, block_size, slots, dtype, self._device, kv_format)
        self._memory = memory
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
