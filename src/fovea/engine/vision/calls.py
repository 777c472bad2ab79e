"""The work of an encoder as calls: a tower says what is computed, the queue for how many images at once.

A tower is a generator (`Slices`) that yields a call and gets its result. On a CPU each call is computed for
its own image, in slices that take a few milliseconds. On a GPU, whose launches would cost more time than the
work of a small image, equal calls of several images are computed together: their rows one after the other,
with the attention of each image for itself (`encode_together`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from fovea.core.measure import stage
from fovea.engine.vision.encoding import Call, Pauses, Slices, current_timer, cuts, run_to_end, slice_rows
from fovea.engine.vision.graphs import BlockGraphs, Inputs
from fovea.kernels.base import Kernels
from fovea.kernels.spans import Runs, Spans

Result = TypeVar("Result")
PAIRS_PER_ROW = 8192
"""Attention pairs (query, key, head) that a slice may have, per row of `slice_rows`."""
ROWS_PER_SLICE = 1 << 17
"""Rows of a slice of several images, counted once for each block. An H100 took about 17 ms for so many."""


def apply_by_rows(layer: Callable[[Tensor], Tensor], x: Tensor, *, unit: int = 1) -> Slices[Tensor]:
    """Apply a layer to the rows of x.

    unit: neighbouring rows that the layer merges into one. A slice holds a multiple of it.
    """
    return cast(Tensor, (yield RowsCall(layer, x, unit)))


def run_blocks(
    blocks: Sequence[RotaryBlock],
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    runs: Sequence[Runs],
    which: Sequence[int] | None = None,
) -> Slices[Tensor]:
    """Compute consecutive blocks. x (patches, hidden) may be changed.

    cos, sin: (patches, 1, head_dim) float32; None: the tower has no rotary positions.
    runs: the layouts of the attention: (groups, patches per group) that attend to each other, from the first
        patch on.
    which: number of the layout that each block has; None: all have the first.
    """
    if not blocks:
        return x
    numbers = tuple(which) if which is not None else (0,) * len(blocks)
    return cast(Tensor, (yield BlocksCall(tuple(blocks), x, cos, sin, tuple(runs), numbers)))


def run_tiles(layers: Sequence[TileLayer], x: Tensor, mask: Tensor | None = None) -> Slices[Tensor]:
    """Compute consecutive layers over tiles of one size, x (tiles, rows, hidden).

    mask: bool (tiles, 1, 1, rows), rows of each tile that are attended to; None: all.
    """
    if not layers:
        return x
    return cast(Tensor, (yield TilesCall(tuple(layers), x, mask)))


class BlockAttention(Protocol):
    """The parts of a block's attention that `BlocksCall` reads."""

    heads: int
    kernels: Kernels


class RotaryBlock(Protocol):
    """A transformer block, as the steps before and after its attention; rotary positions are optional."""

    @property
    def attention(self) -> BlockAttention: ...

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of rows x (T, hidden), not rotated: (T, 3 * heads, head_dim)."""
        ...

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values of rows x, queries and keys rotated."""
        ...

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Apply output projection, norm and MLP to attention output `mixed` of rows x, both (T, hidden)."""
        ...


@dataclass(frozen=True, slots=True)
class ProjectorLayer:
    """A layer of a projector. Metrics and profiles (stage "projector") measure its time."""

    layer: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        timer = current_timer()
        with stage("projector"), nullcontext() if timer is None else timer.call():
            return self.layer(x)


@dataclass(frozen=True, slots=True)
class RowsCall:
    """A layer that computes every row, or every `unit` rows, by itself. x: (rows, ...)."""

    layer: Callable[[Tensor], Tensor]
    x: Tensor
    unit: int

    @property
    def key(self) -> Hashable:
        return self.layer, self.x.shape[1:], self.x.dtype

    def alone(self) -> Pauses[Tensor]:
        outputs, x = [], self.x
        for rows in cuts(x.shape[0], max(1, slice_rows(x) // self.unit) * self.unit):
            outputs.append(self.layer(x[rows]))
            yield None
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def together(self, calls: Sequence[RowsCall], graphs: BlockGraphs | None) -> Pauses[list[Tensor]]:
        rows = [call.x.shape[0] for call in calls]
        yield from ()  # a layer takes less time than a block: no pause
        out = run_to_end(RowsCall(self.layer, _joined([call.x for call in calls]), self.unit).alone())
        return list(torch.split(out, [count * out.shape[0] // sum(rows) for count in rows]))


@dataclass(frozen=True, slots=True)
class BlocksCall:
    """Consecutive blocks over the patches of an image. The fields are the arguments of `run_blocks`."""

    blocks: tuple[RotaryBlock, ...]
    x: Tensor
    cos: Tensor | None
    sin: Tensor | None
    runs: tuple[Runs, ...]
    which: tuple[int, ...]

    @property
    def key(self) -> Hashable:
        return id(self.blocks[0]), len(self.blocks), self.which

    def alone(self) -> Pauses[Tensor]:
        x = self.x
        for block, number in zip(self.blocks, self.which, strict=True):
            x = yield from self._block(block, x, self.runs[number])
        return x

    def _block(self, block: RotaryBlock, x: Tensor, runs: Runs) -> Pauses[Tensor]:
        """Compute one block, a slice of rows or heads at a time. x is changed."""
        heads, kernels = block.attention.heads, block.attention.kernels
        qkv = x.new_empty((x.shape[0], 3 * heads, x.shape[1] // heads))
        for rows in cuts(x.shape[0], slice_rows(x)):
            if self.cos is None or self.sin is None:
                qkv[rows] = block.project(x[rows])
            else:
                qkv[rows] = block.before(x[rows], self.cos[rows], self.sin[rows])
            yield None
        mixed = yield from attend_slices(kernels, qkv, runs, heads)
        for rows in cuts(x.shape[0], slice_rows(x)):
            x[rows] = block.after(mixed[rows], x[rows])
            yield None
        return x

    def together(self, calls: Sequence[BlocksCall], graphs: BlockGraphs | None) -> Pauses[list[Tensor]]:
        counts = [call.x.shape[0] for call in calls]
        x = _joined([call.x for call in calls])
        cos, sin = (
            None if self.cos is None else _joined([getattr(call, name) for call in calls])
            for name in ("cos", "sin")
        )
        spans = [
            Spans.of([run for call in calls for run in call.runs[number]], x.device)
            for number in range(len(self.runs))
        ]
        replayed = None if graphs is None else self._replay(graphs, (x, cos, sin), spans)
        if replayed is not None:
            return list(torch.split(replayed, counts))
        x = yield from self._compute(x, cos, sin, spans)
        return list(torch.split(x, counts))

    def _compute(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, spans: Sequence[Spans]
    ) -> Pauses[Tensor]:
        """Compute all blocks over the rows of several images."""
        left = ROWS_PER_SLICE
        for block, number in zip(self.blocks, self.which, strict=True):
            if left < len(x):
                yield None
                left = ROWS_PER_SLICE
            left -= len(x)
            x = run_block(block, x, cos, sin, spans[number])
        return x

    def _replay(self, graphs: BlockGraphs, inputs: Inputs, spans: list[Spans]) -> Tensor | None:
        """Return the result of all blocks from a graph; None: there is none."""
        head_dim = inputs[0].shape[1] // self.blocks[0].attention.heads
        return graphs.run(self.key, head_dim, inputs, spans, lambda *given: run_to_end(self._compute(*given)))


@dataclass(frozen=True, slots=True)
class TilesCall:
    """Consecutive layers over tiles of one size. The fields are the arguments of `run_tiles`."""

    layers: tuple[TileLayer, ...]
    x: Tensor
    mask: Tensor | None

    @property
    def key(self) -> Hashable:
        return id(self.layers[0]), len(self.layers), None if self.mask is None else id(self.mask)

    def alone(self) -> Pauses[Tensor]:
        x, mask = self.x, self.mask
        at_once = slice_rows(x) // x.shape[1]
        for layer in self.layers:
            outputs = []
            for tiles in cuts(x.shape[0], at_once):
                outputs.append(layer(x[tiles], None if mask is None else mask[tiles]))
                yield None
            x = torch.cat(outputs)
        return x

    def together(self, calls: Sequence[TilesCall], graphs: BlockGraphs | None) -> Pauses[list[Tensor]]:
        if self.mask is not None:
            return [run_to_end(call.alone()) for call in calls]
        shapes = [call.x.shape for call in calls]
        rows = [
            BlocksCall(
                self.layers, call.x.flatten(0, 1), None, None, (((call.x.shape[0], call.x.shape[1]),),),
                (0,) * len(self.layers),
            )
            for call in calls
        ]  # fmt: skip
        outputs = yield from rows[0].together(rows, graphs)
        return [out.view(shape) for out, shape in zip(outputs, shapes, strict=True)]


class TileLayer(RotaryBlock, Protocol):
    """A block that can also be called with tiles (tiles, rows, hidden) and a mask."""

    def __call__(self, x: Tensor, mask: Tensor | None) -> Tensor: ...


def run_block(block: RotaryBlock, x: Tensor, cos: Tensor | None, sin: Tensor | None, spans: Spans) -> Tensor:
    """Compute one block over the rows of several images, x (T, hidden), without a pause. x stays as it is."""
    attention, size = block.attention, slice_rows(x)
    parts = list(cuts(len(x), size))
    qkv = _joined(
        [
            block.project(x[rows])
            if cos is None or sin is None
            else block.before(x[rows], cos[rows], sin[rows])
            for rows in parts
        ]
    )
    mixed = attention.kernels.attend_spans(qkv, spans, attention.heads)
    return _joined([block.after(mixed[rows], x[rows]) for rows in parts])


def attend_slices(kernels: Kernels, qkv: Tensor, runs: Runs, heads: int) -> Pauses[Tensor]:
    """Apply `Kernels.attend_groups` to all runs, one slice at a time.

    A slice is some groups of a run; of a group that is too large for one slice, it is some of the heads.

    qkv: (T, 3 * heads, head_dim).
    runs: (groups, rows per group), from the first row on.

    Returns (T, heads * head_dim).
    """
    out = qkv.new_empty((qkv.shape[0], heads * qkv.shape[2]))
    threads, first, pairs = torch.get_num_threads(), 0, slice_rows(qkv) * PAIRS_PER_ROW
    for groups, count in runs:
        per_head = count * count
        # With fewer heads than threads, some threads would be idle.
        heads_per_slice = min(heads, max(threads, pairs // per_head))
        for some_groups in cuts(groups, max(1, pairs // (per_head * heads))):
            rows = slice(first + some_groups.start * count, first + some_groups.stop * count)
            for some_heads in cuts(heads, heads_per_slice):
                number = some_groups.stop - some_groups.start
                kernels.attend_groups(qkv[rows], number, heads, some_heads, out[rows])
                yield None
        first += groups * count
    return out


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Member(Generic[Result]):
    """One image among those that are encoded together.

    result: the generator's result; None: it is not at its end.
    error: the error of the image itself; None: there is none.
    """

    def __init__(self, slices: Slices[Result]) -> None:
        self._slices = slices
        self._answer: Any = None
        self.call: Call | None = None
        self.result: Result | None = None
        self.error: Exception | None = None
        self._closed = False

    @property
    def ended(self) -> bool:
        """Whether nothing more is computed for the image."""
        return self._closed or self.result is not None or self.error is not None

    def advance(self) -> None:
        """Run to the next call, pause or end, if the image has not ended."""
        if self.ended:
            return
        answer, self._answer = self._answer, None
        try:
            self.call = self._slices.send(answer)
        except StopIteration as stop:
            self.call, self.result = None, stop.value
        except Exception as error:  # noqa: BLE001 - any error concerns this image alone
            self.call, self.error = None, error

    def answer(self, value: Tensor) -> None:
        """Give the result of the call."""
        self.call, self._answer = None, value

    def close(self) -> None:
        """Give the image up, if it has not ended."""
        self._closed = True
        self._slices.close()


def encode_together(
    members: Sequence[Member[Any]], *, merge: bool, graphs: BlockGraphs | None = None
) -> Iterator[None]:
    """Encode several images, a slice at a time. Members may be closed between two slices.

    merge: compute equal calls of several images together; otherwise each by itself.
    graphs: CUDA graphs of calls that are computed together; None: nothing is recorded.

    Raises the error of a call; with `merge` it concerns all images of the call. The error of one image is
    noted in its member.
    """
    while active := [member for member in members if not member.ended]:
        for member in active:
            member.advance()
            while member.call is None and not member.ended:  # it paused; the others wait for its next call
                yield
                member.advance()
        groups: dict[Hashable, list[tuple[Member[Any], Call]]] = {}
        for number, member in enumerate(active):
            if (call := member.call) is not None:
                key = (type(call), call.key) if merge else number
                groups.setdefault(key, []).append((member, call))
        for group in groups.values():
            call = group[0][1]
            if merge:
                results = yield from call.together([each for _, each in group], graphs)
            else:
                results = [(yield from call.alone())]
            for (member, _), value in zip(group, results, strict=True):
                member.answer(value)
