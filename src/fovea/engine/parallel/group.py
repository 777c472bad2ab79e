"""The processes of one engine, and what they send each other.

There are two kinds of groups, both of torch.distributed. In the group of all processes the driver announces
operations, and a worker waits for the next one as long as it takes. In the group of a stage, the processes
that divide its layers add up their parts, over nccl on CUDA and gloo elsewhere. A sum must come within a
time limit, because a process that has stopped would otherwise stop all.

A process says that it lives by counting up in the store at which they all met. So the driver can name the
one that is missing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, ReduceOp, Store
from torch.nn import functional

from fovea.core import errors
from fovea.core.errors import EngineError, FoveaError
from fovea.engine.layers.config import Attention, DecoderConfig
from fovea.engine.layers.decoder import Decoder, LanguageHead
from fovea.engine.layers.experts import DenseBesideExperts, ExpertsBlock
from fovea.engine.layers.layer import CrossLayer
from fovea.engine.layers.linear import Linear
from fovea.engine.layers.ranks import Ranks
from fovea.engine.models.targets import Cut
from fovea.engine.parallel.messages import ENGINE, pack
from fovea.engine.parallel.shares import Grid, cut_of, head_rows, largest_share, share_of, skipped, stages
from fovea.engine.step.executor import LostRank

FIRST_BYTES = 32 << 10
"""An announcement up to this size is one message. A longer one has a second message with the rest."""
LENGTH_BYTES = 8
FOREVER = timedelta(days=365)
LOCALHOST = "127.0.0.1"
BEAT_S = 0.5
"""Seconds between two signs of life."""
MOST_SENT = 16
"""Sends that are not known to be done. Then the oldest is waited for."""
ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")
"""Attribute names of the maps whose inputs are divided."""
log = logging.getLogger("fovea.engine")


class Board:
    """The messages that processes leave for each other in the store at which they meet."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def beat(self, rank: int) -> None:
        self.store.add(f"alive/{rank}", 1)

    def beats(self, rank: int) -> int:
        return int(self.store.add(f"alive/{rank}", 0))

    def report(self, rank: int, error: BaseException | None) -> None:
        """Say that a process has loaded its share, or why it could not."""
        text = None if error is None else [type(error).__name__, str(error)]
        self.store.set(f"loaded/{rank}", json.dumps(text))

    def reported(self, rank: int) -> bool:
        return bool(self.store.check([f"loaded/{rank}"]))

    def error_of(self, rank: int) -> BaseException | None:
        """Return the error that a process has reported; None: it has loaded its share."""
        text = json.loads(self.store.get(f"loaded/{rank}").decode())
        if text is None:
            return None
        kind = getattr(errors, text[0], EngineError)
        known = isinstance(kind, type) and issubclass(kind, FoveaError)
        return kind(text[1]) if known else EngineError(f"{text[0]}: {text[1]}")


class Group(Ranks):
    """This process among those of its engine.

    grid: its place.
    overlapped: number of calls of the decoder that began before the results of earlier ones were there, so
        that stages computed different calls at the same time.
    """

    def __init__(self, grid: Grid, store: Store, timeout_s: float, *, local: bool) -> None:
        """store: for this process' main thread. local: all processes are on this machine."""
        self.grid = grid
        self.rank, self.size = grid.rank, grid.size
        self.tensor_rank, self.tensor_size = grid.tensor_rank, grid.tensor
        self.stages = grid.pipeline
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._coming: list[Any] = []
        self.overlapped = 0
        self.board = Board(store)
        self._timeout = timedelta(seconds=timeout_s)
        self._local = local
        self._whole: DecoderConfig
        self._within = False
        self._memories: dict[int, int] = {}
        self._closed: list[int] = []
        self._numbers = count(ENGINE + 1)
        self._failure: str | None = None
        self._everyone: Any = None
        self._sums: Any = None
        self._pairs: Any = None
        self._device = torch.device("cpu")

    def share(self, config: DecoderConfig) -> DecoderConfig:
        self._whole = config
        bounds = stages(config, self.stages)
        self._starts = {first: stage for stage, (first, _) in enumerate(bounds) if stage}
        self._ends = {
            number: stage for stage, run in enumerate(bounds) for number in range(run[0] + 1, run[1] + 1)
        }
        return share_of(config, self.grid)

    def largest_share(self, model: Any) -> DecoderConfig:
        return largest_share(model.whole, self.grid)

    def head_rows(self, config: DecoderConfig) -> tuple[int, int]:
        return head_rows(config, self.grid)

    def cut(self, config: DecoderConfig, name: str) -> Cut | None:
        return cut_of(config, name, self.grid)

    def skipped(self, config: DecoderConfig) -> tuple[str, ...]:
        return skipped(config, self.grid)

    def connect(self, device: torch.device) -> None:
        """Meet the others. All processes call it at about the same time, with their model's device."""
        self._device = device
        self._everyone = self._gloo("all", self.rank, self.size, FOREVER)
        if self.tensor_size > 1:
            self._sums = self._connect(f"stage {self.grid.stage}", self.tensor_rank, self.tensor_size)
        if self.stages > 1:
            self._pairs = self._connect("pairs", self.rank, self.size)

    def _connect(self, name: str, rank: int, size: int) -> Any:
        """Return a group for tensors on the model's device."""
        if self._device.type == "cuda":
            from torch._C._distributed_c10d import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            store = PrefixStore(name, self.board.store)
            return ProcessGroupNCCL(store, rank, size, options)
        return self._gloo(name, rank, size, self._timeout)

    def _gloo(self, name: str, rank: int, size: int, timeout: timedelta) -> Any:
        store = PrefixStore(name, self.board.store)
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        device = gloo.create_device(hostname=LOCALHOST) if self._local else gloo.create_default_device()
        options._devices = [device]
        return gloo(store, rank, size, options)

    def attach(self, decoder: Decoder, head: LanguageHead) -> None:
        if self.tensor_size > 1:
            self._divide(decoder)
        if self.stages > 1:
            decoder.ranks = self
            self._drop_others(decoder)
        if self.rank == 0:
            divided = not head.tied and self.tensor_size > 1
            for name, module in (("forward", decoder), *((("logits", head),) if divided else ())):
                module.register_forward_pre_hook(self._announce_call(name), with_kwargs=True)
                module.register_forward_hook(self._end_call)

    def _divide(self, decoder: Decoder) -> None:
        """Let the maps whose inputs are divided return sums. The first process alone has their biases."""
        whole = [module for module in decoder.modules() if isinstance(module, ExpertsBlock)]
        parts = {part for block in whole for part in block.modules() if part is not block}
        for name, module in decoder.named_modules():
            if module in parts:
                continue
            if isinstance(module, ExpertsBlock | DenseBesideExperts):
                module.ranks = self
            elif isinstance(module, Linear) and name.rpartition(".")[2] in ROW_PARALLEL:
                module.ranks = self
                if self.tensor_rank:
                    module.bias = None

    def _drop_others(self, decoder: Decoder) -> None:
        """Drop what other stages compute. The driver keeps the maps to keys and values of images."""
        for number, layer in enumerate(decoder.layers):
            if number in decoder.config.own_layers:
                continue
            if self.rank or not isinstance(layer, CrossLayer):
                decoder.layers[number] = nn.Identity()
                continue
            mixer = layer.cross_attn
            for module, kept in ((layer, ("cross_attn",)), (mixer, ("k_proj", "v_proj", "k_norm"))):
                for name in [name for name, _ in module.named_children() if name not in kept]:
                    delattr(module, name)
                for name in [name for name, _ in module.named_parameters(recurse=False)]:
                    delattr(module, name)

    def _announce_call(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._within:
                raise LostRank("an earlier step failed in the middle, so the processes are out of step")
            self.overlapped += bool(self._coming)
            self.announce(name, args, kwargs)
            self._within = True

        return hook

    def _end_call(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._within = False

    def open_run(self, owner: object, memory: Any, *shape: Any) -> None:
        closed = [self._memories.pop(identity, ENGINE) for identity in self._closed]
        self._closed.clear()
        number = next(self._numbers)
        self._memories[id(memory)] = number
        weakref.finalize(owner, self._closed.append, id(memory))
        self.announce("open_run", number, closed, shape)

    def announce(self, name: str, *args: Any) -> None:
        data = pack(name, args, self._memories)
        head = len(data).to_bytes(LENGTH_BYTES, "little") + data[: FIRST_BYTES - LENGTH_BYTES]
        first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
        first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._wait(lambda: self._everyone.broadcast(first, 0), on_host=True)
        rest = data[FIRST_BYTES - LENGTH_BYTES :]
        if rest:
            whole = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
            self._wait(lambda: self._everyone.broadcast(whole, 0), on_host=True)

    def receive(self) -> bytes:
        """Wait for the next announcement, however long it takes."""
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._everyone.broadcast(first, 0).wait()
        data = first.numpy().tobytes()
        size = int.from_bytes(data[:LENGTH_BYTES], "little")
        if size <= FIRST_BYTES - LENGTH_BYTES:
            return data[LENGTH_BYTES : LENGTH_BYTES + size]
        rest = torch.empty(size - FIRST_BYTES + LENGTH_BYTES, dtype=torch.uint8)
        self._everyone.broadcast(rest, 0).wait(self._timeout)
        return data[LENGTH_BYTES:] + rest.numpy().tobytes()

    def add(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        self._wait(lambda: self._sums.allreduce(part, ReduceOp.SUM))
        return part

    def gather(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.tensor_size)]
        self._wait(lambda: self._sums.allgather([parts], [part]))
        return torch.stack(parts)

    def enter(self, x: Tensor, layer: int) -> Tensor:
        stage = self._starts.get(layer)
        if stage is None or not x.numel():
            return x
        if stage == self.grid.stage + 1:
            self._send(x, self.rank + self.tensor_size)
        elif stage == self.grid.stage:
            return self._receive(x, self.rank - self.tensor_size, now=True)
        return x

    def bring(self, x: Tensor, layer: int, *, now: bool = False) -> Tensor:
        stage = self._ends.get(layer, 0)
        if not stage or not x.numel():
            return x
        if self.rank == 0:
            return self._receive(x, stage * self.tensor_size, now=now)
        if self.grid.stage == stage and self.tensor_rank == 0:
            self._send(x, 0)
        return x

    def settle(self) -> None:
        while self._coming:
            self._wait(self._coming.pop)

    def _send(self, x: Tensor, rank: int) -> None:
        """Begin to send rows. They are kept until they have been sent."""
        x = x.contiguous()
        while self._sent and (len(self._sent) >= MOST_SENT or self._sent[0][0].is_completed()):
            self._wait(lambda: self._sent.popleft()[0])
        self._sent.append((self._begin(lambda: self._pairs.send([x], rank, 0)), x))

    def _receive(self, x: Tensor, rank: int, *, now: bool) -> Tensor:
        """Return rows of another process. x: rows of that shape."""
        x = torch.empty_like(x, memory_format=torch.contiguous_format)
        if now:
            self._wait(lambda: self._pairs.recv([x], rank, 0))
        else:
            self._coming.insert(0, self._begin(lambda: self._pairs.recv([x], rank, 0)))
        return x

    def _begin(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RuntimeError as error:
            raise self._lost(error) from error

    def join_heads(self, part: Tensor) -> Tensor:
        return part if self.tensor_size == 1 else self.gather(part).flatten(0, 1)

    def join_keys(self, part: Tensor, layer: int) -> Tensor:
        if self.tensor_size == 1:
            return part
        mixer = self._whole.layers[layer].mixer
        assert isinstance(mixer, Attention)
        different = self.gather(part)[:: max(1, self.tensor_size // mixer.kv_heads)]
        return different.transpose(0, 1).flatten(1, 2)

    def join_logits(self, part: Tensor) -> Tensor:
        if self.tensor_size == 1:
            return part
        vocabulary = self._whole.vocab_size
        own = -(-vocabulary // self.tensor_size)
        parts = self.gather(functional.pad(part, (0, own - part.shape[1])))
        return parts.transpose(0, 1).flatten(1)[:, :vocabulary]

    def add_heads(self, scores: Tensor) -> Tensor:
        same = self.tensor_size // self._whole.attention_heads.kv
        if same <= 1:
            return scores
        first = self.tensor_rank // same * same
        return self.gather(scores)[first : first + same].sum(0)

    def _wait(self, work: Callable[[], Any], *, on_host: bool = False) -> None:
        """Do something together. Raises LostRank if that fails or takes too long.

        on_host: over gloo, whatever the device is.
        """
        if self._failure is not None:
            raise LostRank(self._failure)
        try:
            pending = work()
            if self._device.type == "cuda" and not on_host:
                pending.wait()  # the stream waits, and nccl has the time limit
            else:
                pending.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> LostRank:
        return LostRank(self.missing() or f"the processes cannot compute together: {error}")

    def missing(self) -> str:
        """Return which process has gone, for the error of an operation that has failed; "": not known."""
        return ""

    def fail(self, reason: str) -> None:
        """Let all further operations fail. For any thread."""
        self._failure = self._failure or reason


class Pulse:
    """Counts up in the store while this process lives, in a thread of its own.

    store: another connection to the store. on_loss: called when the store has gone.
    """

    def __init__(self, store: Store, rank: int, on_loss: Callable[[], None]) -> None:
        self._board, self._rank, self._on_loss = Board(store), rank, on_loss
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fovea-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.wait(BEAT_S):
                self._board.beat(self._rank)
        except Exception:  # noqa: BLE001 - whatever it is, the store is needed
            self._on_loss()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=5)


class Watch:
    """Looks in a thread of its own whether the other processes live.

    gone: returns the numbers of processes that are known to have ended, and how.
    on_loss: called once, with the reason, when one is missing.
    """

    def __init__(
        self,
        store: Store,
        size: int,
        timeout_s: float,
        gone: Callable[[], dict[int, str]],
        on_loss: Callable[[str], None],
    ) -> None:
        self._board, self._size, self._timeout_s = Board(store), size, timeout_s
        self._gone, self._on_loss = gone, on_loss
        self._latest: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fovea-ranks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S / 2):
            reason = self.missing(self._timeout_s)
            if reason:
                self._on_loss(reason)
                return

    def missing(self, silence_s: float) -> str:
        """Return which process has gone, or has been silent for so long; "": all are there."""
        for rank, how in self._gone().items():
            return f"rank {rank} has ended ({how}); see its log above"
        now = time.monotonic()
        with suppress(Exception):
            for rank in range(1, self._size):
                beats = self._board.beats(rank)
                if self._latest.get(rank, (-1, now))[0] != beats:
                    self._latest[rank] = beats, now
                elif beats and now - self._latest[rank][1] > silence_s:
                    return f"rank {rank} has not answered for {silence_s:g} s"
        return ""

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=5)
