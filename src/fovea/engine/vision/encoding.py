"""How an encoder runs: in slices that can pause, in a stream of the device; and what it returns.

A slice takes a few milliseconds. The boundaries of slices depend on shapes alone, so the result does not
depend on when the caller pauses. On a CPU the calling thread runs them; CUDA has a stream of its own for
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from fovea.engine.vision.graphs import BlockGraphs
from fovea.engine.vision.processor.base import ProcessedImage


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

    def compact(self) -> VisualFeatures:
        """Return the features in memory of their own, if they are a part of a larger result."""
        embeds, deepstack = _own(self.embeds), tuple(map(_own, self.deepstack))
        return replace(self, embeds=embeds, deepstack=deepstack)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], created_at: float) -> VisualFeatures:
        """Rebuild features from the tensors that the property `tensors` returned, in the same order."""
        last = tensors[-1]
        places = last if len(tensors) > 1 and last.dtype is torch.int32 else None
        deepstack = tensors[1:] if places is None else tensors[1:-1]
        return cls(tensors[0], tuple(deepstack), created_at, places)


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


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


BATCH_ROWS = 4096
"""Rows of output of the images that are encoded together on a GPU.

A tower that merges 2 x 2 patches computes 16,384 patches for them. An H100 took 68 ms.
"""


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

    @property
    def batch_rows(self) -> int:
        """Rows of output of the images that are encoded together; 0: every image is encoded by itself."""
        ...

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

    batch_rows = 0

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

    batch_rows = BATCH_ROWS

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
    timer current, and `ProjectorLayer` sets a mark before and after every call: a reading of the clock on a
    CPU, an event on CUDA.
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


class Call(Protocol):
    """A part of an encoder's work, which can be computed with equal parts for other images."""

    @property
    def key(self) -> Hashable:
        """Calls of one class with equal keys can be computed together."""
        ...

    def alone(self) -> Pauses[Tensor]:
        """Compute the call, one slice at a time."""
        ...

    def together(self, calls: Sequence[Any], graphs: BlockGraphs | None) -> Pauses[list[Tensor]]:
        """Compute calls with the key of this one, itself included, and return their results.

        graphs: CUDA graphs of earlier calls; None: nothing is recorded.
        """
        ...


Pauses = Generator[None, None, Result]
"""A computation that pauses after every slice."""
Slices = Generator[Call | None, Any, Result]
"""An encoder's work for one image: it yields calls, whose results it is sent, and None after a slice."""
UpcomingImages = Callable[[], Iterator[ProcessedImage]]
"""A function that yields the images that are probably encoded next. An encoder may add some to a slice."""

CPU_ROWS, OTHER_ROWS = 512, 16384
"""Rows of a slice on a CPU, and on other devices.

On two server cores, 512 rows of one block of a 0.1 B tower take 5 to 10 ms.
"""


def one_by_one(slices: Slices[Result]) -> Pauses[Result]:
    """Compute every call by itself, and pause after every slice."""
    answer: Tensor | None = None
    try:
        while True:
            call = slices.send(answer)
            answer = None
            if call is None:
                yield
            else:
                answer = yield from call.alone()
    except StopIteration as stop:
        result: Result = stop.value
        return result
    finally:
        slices.close()


def run_to_end(slices: Slices[Result]) -> Result:
    """Run all slices without a pause and return the result."""
    steps = one_by_one(slices)
    while True:
        try:
            next(steps)
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
