"""The processes that compute one decoder together, as its layers see them.

`Ranks` is a process that is alone, so it does nothing. `engine.parallel` has the one for several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fovea.engine.layers.config import DecoderConfig


class Ranks:
    """The processes that compute one decoder.

    rank, size: number of this process, and of all. Rank 0 is the driver: it has the scheduler, the tower and
        the embedding table. The others do what it announces.
    tensor_rank, tensor_size: the same among the processes that divide the layers of this one.
    stages: number of stages into which the layers are divided.
    """

    rank = tensor_rank = 0
    size = tensor_size = stages = 1

    def share(self, config: DecoderConfig) -> DecoderConfig:
        """Return the shape of this process' share of a decoder."""
        return config

    def largest_share(self, model: Any) -> DecoderConfig:
        """Return the share of the process that needs most memory for each token. model: with `whole`."""
        config: DecoderConfig = model.decoder.config
        return config

    def head_rows(self, config: DecoderConfig) -> tuple[int, int]:
        """Return this process' rows of a language head that is not tied. config: of the whole decoder."""
        return 0, config.vocab_size

    def cut(self, config: DecoderConfig, name: str) -> Any:
        """Return the part of a checkpoint tensor that this process has, a `Cut`; None: all of it.

        config: the shape of the whole decoder. name: canonical name of the tensor.
        """
        return None

    def skipped(self, config: DecoderConfig) -> tuple[str, ...]:
        """Return which tensors this process does not load: regular expressions of canonical names."""
        return ()

    def attach(self, decoder: Any, head: Any) -> None:
        """Let the layers of a decoder add up their parts, and its head join them.

        Called before the weights are loaded.
        """

    def meet(self, device: torch.device) -> None:
        """Wait until the others have loaded their shares. Raises their errors. device: of the weights."""

    def on_loss(self, act: Callable[[Exception], None]) -> None:
        """Set what is done, in another thread, when a process has gone."""

    def open_run(self, owner: object, memory: Any, *shape: Any) -> None:
        """Let the others allocate their share of memory beside the engine's, for as long as `owner` lives.

        shape: further arguments of `DecoderMemory.allocate`, but for the device.
        """

    def announce(self, name: str, *args: Any) -> None:
        """Tell the other processes which operation comes next, with its arguments. For the driver."""

    def add(self, part: Tensor) -> Tensor:
        """Return the sum of the parts of all processes that divide these layers."""
        return part

    def enter(self, x: Tensor, layer: int) -> Tensor:
        """Return the rows before a layer. If a stage begins with it, they come from the stage before.

        x: the rows. In a process that did not compute the layer before, only their shape counts.
        """
        return x

    def bring(self, x: Tensor, layer: int, *, now: bool = False) -> Tensor:
        """Return to the driver the rows after the layer before number `layer`; other processes have no use.

        now: the driver waits for them. Otherwise they are there after `settle`.
        """
        return x

    def settle(self) -> None:
        """Wait for all rows that were brought. For the driver."""

    def own(self, residual: Tensor | None) -> Tensor | None:
        """Return what this process adds to its part: the first one of the processes adds the residual."""
        return residual if self.tensor_rank == 0 else None

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts of all processes that divide these layers, (tensor_size, *part.shape)."""
        return part[None]

    def join_logits(self, part: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary. part: (rows, own rows of the head)."""
        return part

    def join_heads(self, part: Tensor) -> Tensor:
        """Return the results of the query heads of all processes. part: (own query heads, ...)."""
        return part

    def join_keys(self, part: Tensor, layer: int) -> Tensor:
        """Return the keys of all KV heads of a layer. part: (rows, own KV heads, head_dim)."""
        return part

    def add_heads(self, scores: Tensor) -> Tensor:
        """Return the sum over the processes that have the same KV heads. scores: (KV heads, n)."""
        return scores

    def close(self) -> None:
        """End the other processes."""


ALONE = Ranks()
_RANKS: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current_ranks() -> Ranks:
    """Return the processes for which a decoder is being built."""
    return _RANKS.get()


@contextmanager
def for_ranks(ranks: Ranks) -> Iterator[None]:
    """Build decoders as the share of a process while the context lasts."""
    token = _RANKS.set(ranks)
    try:
        yield
    finally:
        _RANKS.reset(token)
