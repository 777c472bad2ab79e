"""Copies KV blocks inside the pool, and between the pool and host memory.

Host memory holds each block in one piece, all layers together. The pool holds a block in one piece per layer.
On a CPU the moves of a step are plain copies, one after the other. On CUDA they overlap with computation:

    compute stream  gather saved blocks -> copies inside the pool -> scatter loaded blocks -> the step
    save stream     after the gather: staging memory to host memory
    load stream     before the scatter: host memory to staging memory

The step may overwrite a saved block, so it is gathered before. The compute stream waits for the loads of its
own step. It waits for a save only if both staging buffers of saves are in use. Only these two streams use
host memory, and one waits for the other where both use the same slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fovea.engine.kv.manager import Compaction, Move
from fovea.kernels.pages import KVPool
from fovea.kernels.transfer import row_index

STAGING_BYTES = 16 << 20
"""Most bytes of a staging buffer, unless a block is larger. PCIe 4.0 x16 copies them in less than 1 ms."""
STAGING_BUFFERS = 4
"""Two for saves and two for loads."""


class Event(Protocol):
    """A point in a stream (`torch.cuda.Event`)."""

    def query(self) -> bool:
        """Whether the work before it is done."""
        ...


class Stream(Protocol):
    """A queue of work on the device (`torch.cuda.Stream`)."""

    def wait_event(self, event: Event) -> None: ...


class Streams(Protocol):
    """The streams of a device. `CudaStreams` is the only one outside of tests."""

    def new(self) -> Stream: ...

    def current(self) -> Stream:
        """Return the stream in which steps compute."""
        ...

    def mark(self, stream: Stream) -> Event:
        """Return the point after all work that was launched in a stream so far."""
        ...

    def activate(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context. Work that is launched inside it runs in this stream."""
        ...


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self) -> Stream:
        return cast(Stream, torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def current(self) -> Stream:
        return cast(Stream, torch.cuda.current_stream(self._device))

    def mark(self, stream: Stream) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(cast(Any, stream))
        return event

    def activate(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(cast(Any, stream))


def move_streams(device: torch.device) -> Streams | None:
    """Return the streams of a device; None: it has none, so copies run in the calling thread."""
    return CudaStreams(device) if device.type == "cuda" else None


def _no_compaction(move: Compaction) -> None:
    raise RuntimeError(f"sequence {move.owner} leaves out tokens, but nobody knows which")


class BlockMoves:
    """The host memory of KV blocks, and the copies of blocks that step plans ask for.

    host: pages, (host_blocks, layers, bytes of a page) uint8; None: there is none.
    """

    def __init__(
        self,
        pools: tuple[KVPool, ...],
        host_blocks: int,
        streams: Streams | None = None,
        compact: Callable[[Compaction], None] = _no_compaction,
    ) -> None:
        """pools: the pages, see `DecoderMemory.kv`. Only blocks of the first one have a place in host memory.

        streams: streams that overlap with computation; None: each move is a copy in the calling thread.
        compact: copies the rows that a sequence keeps, in the compute stream.
        """
        self._pools = pools
        self._compact = compact
        self.host: Tensor | None = None
        self._transfers: HostTransfers | None = None
        if not host_blocks:
            return
        pages = pools[0].pages
        layers, _, page = pages.shape
        pinned = pages.device.type == "cuda"
        self.host = torch.empty((host_blocks, layers, page), dtype=pages.dtype, pin_memory=pinned)
        if streams is not None:
            self._transfers = HostTransfers(pools[0], self.host, streams)

    @property
    def by_streams(self) -> bool:
        """Whether copies to and from host memory overlap with computation."""
        return self._transfers is not None

    def run(self, moves: Sequence[Move | Compaction]) -> None:
        """Carry out moves as if one after the other. Call it in the compute stream, before the step."""
        copies: list[Move] = []
        for move in moves:
            if not isinstance(move, Compaction):
                copies.append(move)
                continue
            self._run(copies)
            self._compact(move)
            copies = []
        self._run(copies)

    def _run(self, moves: Sequence[Move]) -> None:
        if self._transfers is None or not moves:
            for move in moves:
                self._move(move)
            return
        for batch in batches(moves):
            self._transfers.save(batch.saves)
            for move in batch.copies:
                self._move(move)
            self._transfers.load(batch.loads)

    def _move(self, move: Move) -> None:
        """Copy one block in the calling thread. This is also the reference for the transfers by streams."""
        pool = self._pools[move.windowed]
        if move.kind == "copy":
            if move.source != move.target:
                copy_rows(pool, pool.pages[:, move.source], pool.pages[:, move.target], move.rows)
            return
        assert self.host is not None
        if move.kind == "save":
            self.host[move.target].copy_(pool.pages[:, move.source])
        else:
            copy_rows(pool, self.host[move.source], pool.pages[:, move.target], move.rows)


def copy_rows(pool: KVPool, source: Tensor, target: Tensor, rows: int) -> None:
    """Copy the first `rows` tokens of a block's pages. source, target: (layers, bytes of a page)."""
    for part, own in zip(pool.parts(source), pool.parts(target), strict=True):
        own[:, :rows].copy_(part[:, :rows])


class Batch:
    """Moves of which all saves can go first, then all copies, and all loads last.

    saves, copies, loads: moves of each kind, in their order.
    """

    def __init__(self) -> None:
        self.saves: list[Move] = []
        self.copies: list[Move] = []
        self.loads: list[Move] = []
        self._written: set[tuple[bool, int]] = set()
        self._loaded_blocks: set[int] = set()
        self._saved_slots: set[int] = set()
        self._loaded_slots: set[int] = set()

    def add(self, move: Move) -> bool:
        """Add the next move. Returns False, and does not add it, if the order would then matter."""
        if move.kind == "save":
            if (
                (False, move.source) in self._written
                or move.target in self._saved_slots
                or move.target in self._loaded_slots
            ):
                return False
            self.saves.append(move)
            self._saved_slots.add(move.target)
            return True
        if move.kind == "load":
            if move.target in self._loaded_blocks:
                return False
            self.loads.append(move)
            self._loaded_blocks.add(move.target)
            self._loaded_slots.add(move.source)
            self._written.add((False, move.target))
            return True
        if not move.windowed and self._loaded_blocks & {move.source, move.target}:
            return False
        self.copies.append(move)
        self._written.add((move.windowed, move.target))
        return True


def batches(moves: Sequence[Move]) -> Iterator[Batch]:
    """Divide the moves of a step into batches. Usually it is one."""
    batch = Batch()
    for move in moves:
        if not batch.add(move):
            yield batch
            batch = Batch()
            batch.add(move)
    yield batch


def staging_blocks(block_bytes: int, host_blocks: int) -> int:
    """Return how many blocks a staging buffer holds. There are STAGING_BUFFERS of them."""
    return max(1, min(host_blocks, STAGING_BYTES // block_bytes)) if host_blocks else 0


class HostTransfers:
    """Copies between a pool and host memory that overlap with computation.

    Blocks that are saved or loaded together pass through staging memory on the device. So there is one
    operation for the scattered blocks of the pool, and one copy for each run of neighbouring slots. Slots are
    given out, and evicted, in order, so most steps need one or two copies.
    """

    def __init__(self, pool: KVPool, host: Tensor, streams: Streams) -> None:
        """host: (slots, layers, bytes of a page) uint8."""
        self._pool = pool
        self._blocks = pool.pages.transpose(0, 1)
        self._host = host
        self._streams = streams
        most = staging_blocks(host[0].nbytes, len(host))
        self._outgoing, self._incoming = (Staging(host, most, pool.pages.device) for _ in range(2))
        self._save_stream, self._load_stream = streams.new(), streams.new()
        # The latest copy to each slot, and from it, as long as it may not be done.
        self._writes: dict[int, Event] = {}
        self._reads: dict[int, Event] = {}

    def save(self, moves: Sequence[Move]) -> None:
        """Begin to copy blocks to their slots. The blocks may be overwritten as soon as this returns."""
        for part in _parts(sorted(moves, key=_slot), self._outgoing.size):
            compute, slots = self._streams.current(), [_slot(move) for move in part]
            buffer = self._outgoing.take(compute)[: len(part)]
            torch.index_select(self._blocks, 0, self._index([move.source for move in part]), out=buffer)
            self._save_stream.wait_event(self._streams.mark(compute))
            self._wait(self._save_stream, self._reads, slots)
            with self._streams.activate(self._save_stream):
                for at, run in _runs(slots):
                    self._host[run].copy_(buffer[at], non_blocking=True)
            done = self._streams.mark(self._save_stream)
            self._outgoing.give(done)
            self._writes.update(dict.fromkeys(slots, done))

    def load(self, moves: Sequence[Move]) -> None:
        """Copy slots to their blocks. Work that is launched in the compute stream afterwards sees them."""
        for part in _parts(sorted(moves, key=_slot), self._incoming.size):
            compute, slots = self._streams.current(), [_slot(move) for move in part]
            buffer = self._incoming.take(self._load_stream)[: len(part)]
            self._wait(self._load_stream, self._writes, slots)
            with self._streams.activate(self._load_stream):
                for at, run in _runs(slots):
                    buffer[at].copy_(self._host[run], non_blocking=True)
            done = self._streams.mark(self._load_stream)
            self._reads.update(dict.fromkeys(slots, done))
            compute.wait_event(done)
            self._scatter(part, buffer)
            self._incoming.give(self._streams.mark(compute))

    def _scatter(self, moves: Sequence[Move], buffer: Tensor) -> None:
        """Write whole blocks in one operation, and each part of a block in one of its own."""
        size = self._pool.block_size
        whole = [place for place, move in enumerate(moves) if move.rows == size]
        if whole:
            source = buffer if len(whole) == len(moves) else buffer.index_select(0, self._index(whole))
            self._blocks.index_copy_(0, self._index([moves[place].target for place in whole]), source)
        for place, move in enumerate(moves):
            if move.rows < size:
                copy_rows(self._pool, buffer[place], self._blocks[move.target], move.rows)

    def _index(self, numbers: list[int]) -> Tensor:
        return row_index(numbers, self._blocks.device)

    @staticmethod
    def _wait(stream: Stream, copies: dict[int, Event], slots: Sequence[int]) -> None:
        """Let a stream wait for copies that still use these slots, and forget all copies that are done."""
        events = {id(event): event for event in copies.values()}
        done = {name for name, event in events.items() if event.query()}
        for slot in [slot for slot, event in copies.items() if id(event) in done]:
            del copies[slot]
        for name in {id(copies[slot]) for slot in slots if slot in copies}:
            stream.wait_event(events[name])


class Staging:
    """Two buffers on the device, used in turns, so that one can be filled while the other is read.

    size: blocks that a buffer holds.
    """

    def __init__(self, host: Tensor, size: int, device: torch.device) -> None:
        """host: the blocks, (slots, ...)."""
        self.size = size
        shape = (size, *host.shape[1:])
        self._buffers = [torch.empty(shape, dtype=host.dtype, device=device) for _ in range(2)]
        self._free: list[Event | None] = [None, None]

    def take(self, writer: Stream) -> Tensor:
        """Return the next buffer. The stream that will write it waits until the buffer is no longer read."""
        self._buffers.reverse()
        self._free.reverse()
        if self._free[0] is not None:
            writer.wait_event(self._free[0])
        return self._buffers[0]

    def give(self, event: Event) -> None:
        """Note the event after which the latest buffer may be written again."""
        self._free[0] = event


def _slot(move: Move) -> int:
    """The slot of a save or a load."""
    return move.target if move.kind == "save" else move.source


def _parts(moves: Sequence[Move], size: int) -> Iterator[Sequence[Move]]:
    for first in range(0, len(moves), size):
        yield moves[first : first + size]


def _runs(slots: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield, for each run of neighbouring slots, its places in `slots` and the slots. slots: ascending."""
    first = 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1:
            yield slice(first, place), slice(slots[first], slots[place - 1] + 1)
            first = place
