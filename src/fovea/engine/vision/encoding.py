"""How an encoder runs: in slices that can pause, in a stream of the device; and what it returns.

A slice takes a few milliseconds. The boundaries of slices depend on shapes alone, so the result does not
depend on when the caller pauses. On a CPU the calling thread runs them; CUDA has a stream of its own for
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from fovea.core.measure import stage
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.kernels.base import Kernels


@dataclass(frozen=True, slots=True)
class VisualFeatures:
    """Features of one image, which the decoder reads.

    embeds: (tokens, hidden), the input embeddings of the image's visual tokens. If the image's states lie
        outside of the prompt, their keys and values for the first layer with cross-attention,
        (`VisualPlan.states`, 2 * kv_heads * head_dim).
    deepstack: tensors (tokens, hidden). Decoder layer i adds deepstack[i] to the hidden states of the visual
        tokens. For states outside of the prompt, the keys and values for the other layers.
    created_at: time of encoding, in seconds of `time.time`. The age counts from it in every tier of the
        cache.
    places: int32, (tokens, 2): row and column of each token in the grid of the whole image. For models whose
        positions have no rows it is (tokens, 1): the number of the token among all tokens of the image.
        None: all tokens are present, in order.
    """

    embeds: Tensor
    deepstack: tuple[Tensor, ...] = ()
    created_at: float = field(default_factory=time.time, compare=False)
    places: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.embeds, *self.deepstack, *(() if self.places is None else (self.places,))

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], created_at: float) -> VisualFeatures:
        """Rebuild features from the tensors that the property `tensors` returned, in the same order."""
        last = tensors[-1]
        places = last if len(tensors) > 1 and last.dtype is torch.int32 else None
        deepstack = tensors[1:] if places is None else tensors[1:-1]
        return cls(tensors[0], tuple(deepstack), created_at, places)


@dataclass(frozen=True, slots=True)
class VisualShape:
    """Numbers of rows that each stage of a vision tower computes for one image.

    patches: rows of the patch embedding.
    rows: rows of the blocks; a class token is one more.
    projector_rows: rows of the projector.
    hidden: width of the blocks.
    pairs: pairs of rows that attend to each other, summed over all blocks.
    merged_rows: rows of the modules after a merge of rows inside the tower, which
        `VisionLanguageModel.merged_modules` returns; 0: the tower has no merge.
    """

    patches: int
    rows: int
    projector_rows: int
    hidden: int
    pairs: int
    merged_rows: int = 0


class Mark(Protocol):
    """A point in a stream: done when all work that was launched before it has ended."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None: ...

    def since(self, earlier: Self) -> float:
        """Return the seconds from an earlier mark to this one. Both must be done."""
        ...


class EncoderStream(Protocol):
    """The stream in which an encoder's slices run.

    A mark is a point in the stream between two slices. The output of a slice may be read as soon as the
    mark after it is done. On a CPU a mark is done when it is set. This way the callers need no code of
    their own for each device.
    """

    def activate(self) -> AbstractContextManager[object]:
        """Return a context. Work that is launched inside it runs in this stream."""
        ...

    def mark(self) -> Mark: ...

    def hand_over(self, features: VisualFeatures) -> None:
        """Tell the allocator that the decoder still reads these features. They must be complete.

        Otherwise it might reuse their memory before the decoder's stream has read them.
        """
        ...


class _DoneMark:
    done = True

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        """Return at once: the mark is always done."""

    def since(self, earlier: Self) -> float:
        return self._at - earlier._at


class InlineStream:
    """The encoder's stream on a CPU: a slice runs in the calling thread and is done when its call returns."""

    def activate(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        return _DoneMark()

    def hand_over(self, features: VisualFeatures) -> None:
        """Do nothing: encoder and decoder share the memory."""


class _EventMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    @property
    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, earlier: Self) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1000


class CudaStream:
    """A CUDA stream of the encoder's own.

    It needs to wait for no other stream: the weights were loaded before it was created, and pixels are copied
    in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def activate(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        return _EventMark(self._stream)

    def hand_over(self, features: VisualFeatures) -> None:
        for tensor in features.tensors:
            tensor.record_stream(torch.cuda.current_stream(self._device))


def encoder_stream(device: torch.device) -> EncoderStream:
    """Return the kind of stream that fits the device."""
    return CudaStream(device) if device.type == "cuda" else InlineStream()


class ProjectorCall(NamedTuple):
    """A call of a projector, by the marks before and after it."""

    begin: Mark
    end: Mark

    @property
    def seconds(self) -> float:
        """Duration of the call. Both marks must be done."""
        return self.end.since(self.begin)


class ProjectorTimer:
    """The calls of a projector in the slices of one encoder stream.

    The projector is called deep inside an encoder's generator. So the queue that runs the slices makes a
    timer current, and `as_projector` sets a mark before and after every call: a look at the clock on a CPU,
    an event on CUDA, about two per image.
    """

    def __init__(self, stream: EncoderStream) -> None:
        self._stream = stream
        self._calls: list[ProjectorCall] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        """Note the calls that this thread makes inside the context."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Note one call."""
        begin = self._stream.mark()
        yield
        self._calls.append(ProjectorCall(begin, self._stream.mark()))

    def take(self) -> tuple[ProjectorCall, ...]:
        """Return the calls since the last `take`."""
        calls = tuple(self._calls)
        self._calls.clear()
        return calls


_current: ContextVar[ProjectorTimer | None] = ContextVar("projector_timer", default=None)


def current_timer() -> ProjectorTimer | None:
    """Return the timer that the calling thread's encoder queue made current; None: nothing is measured."""
    return _current.get()


Result = TypeVar("Result")
Slices = Generator[None, None, Result]
"""A computation that can pause: it yields after every slice, and returns the result after the last one."""
UpcomingImages = Callable[[], Iterator[ProcessedImage]]
"""A function that yields the images that are probably encoded next. An encoder may add some to a slice."""

CPU_ROWS, OTHER_ROWS = 512, 16384
"""Rows of a slice on a CPU, and on other devices.

On two server cores, 512 rows of one block of a 0.1 B tower take 5 to 10 ms.
"""
PAIRS_PER_ROW = 8192
"""Attention pairs (query, key, head) that a slice may have, per row of `slice_rows`."""


def run_to_end(slices: Slices[Result]) -> Result:
    """Run all slices without a pause and return the result."""
    while True:
        try:
            next(slices)
        except StopIteration as stop:
            result: Result = stop.value
            return result


def slice_rows(x: Tensor) -> int:
    """Return the number of rows of a slice on the device of `x`."""
    return CPU_ROWS if x.device.type == "cpu" else OTHER_ROWS


def cuts(count: int, size: int) -> Iterator[slice]:
    """Cut [0, count) into ranges of at most `size`. A size below 1 counts as 1."""
    size = max(1, size)
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


def apply_by_rows(layer: Callable[[Tensor], Tensor], x: Tensor, *, unit: int = 1) -> Slices[Tensor]:
    """Apply a layer to the rows of x, one slice of rows at a time.

    unit: neighbouring rows that the layer merges into one. A slice holds a multiple of it.
    """
    outputs = []
    for rows in cuts(x.shape[0], max(1, slice_rows(x) // unit) * unit):
        outputs.append(layer(x[rows]))
        yield
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def as_projector(layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a projector layer, so that metrics and profiles (stage "projector") know its time."""

    def apply(x: Tensor) -> Tensor:
        timer = current_timer()
        with stage("projector"), nullcontext() if timer is None else timer.call():
            return layer(x)

    return apply


def attend_slices(
    kernels: Kernels, qkv: Tensor, runs: Sequence[tuple[int, int]], heads: int
) -> Slices[Tensor]:
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
                yield
        first += groups * count
    return out


class Tiler(Protocol):
    """Encodes tiles and lays them out as a picture. `models.llava.TiledLlava` implements it.

    side: patches along an edge of a tile.
    newline: the embedding (hidden,) that ends each row of the picture.
    """

    @property
    def side(self) -> int: ...

    @property
    def newline(self) -> Tensor: ...

    def tiles(self, image: ProcessedImage) -> Slices[Tensor]:
        """Projected patches of the image's tiles, (tiles, patches, hidden)."""
        ...

    def picture(self, tiles: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Tiles (rows * columns, side * side, hidden) put together: (hidden, rows * side, columns * side)."""
        ...
