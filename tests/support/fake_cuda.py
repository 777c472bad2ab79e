"""Stand-ins for CUDA's streams, events and graphs on a CPU, so that code for a GPU runs here.

Work in a stream runs at once, so an event is over when it is recorded. A graph is real in what matters to its
users: it notes every operation and every launch of a Triton kernel while it is recorded, and a replay repeats
exactly these, on the tensors of the recording. So an answer is wrong if a step depends on a number that
Python computes in each step. While a graph is recorded, an operation that waits for the GPU raises
RuntimeError, as on CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from fovea.engine import assemble
from fovea.engine.execute import runner
from fovea.engine.execute.block_moves import CudaStreams
from fovea.engine.execute.decode_rows import PaddedDecodes
from fovea.engine.sample.sampler import Sampler
from fovea.engine.vision.encoding import CudaStream

WAITS = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten._unique2,
}
"""Operations whose result, or its size, the host has to know."""


class Stream:
    """A stream in which work runs at once."""

    def __init__(self, device: torch.device | None = None) -> None:
        """device: as for a stream of CUDA; not used."""

    def wait_stream(self, other: Self) -> None:
        """Return at once: the other stream's work is done."""

    def wait_event(self, event: Event) -> None:
        """Return at once: the event is over."""

    def synchronize(self) -> None:
        """Return at once: this stream's work is done."""


class Event:
    """A point of time. It is over when it is recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once: the event is over."""

    def elapsed_time(self, later: Self) -> float:
        """Return the milliseconds from this event to a later one."""
        return 1000 * (later._at - self._at)


class Graph:
    """The operations of a recording, in order."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


class Recording(TorchDispatchMode):
    """Records the operations within it into a graph; they run as well."""

    def __init__(self, graph: Graph, pool: object = None, capture_error_mode: str = "global") -> None:
        """pool, capture_error_mode: as for CUDA's graphs; not used."""
        super().__init__()
        self._calls = graph.calls
        self._launch = mock.patch.object(GridExecutor, "__call__", self._note_launch(GridExecutor.__call__))

    def __enter__(self) -> Self:
        self._launch.start()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._launch.stop()

    def _note_launch(self, launch: Callable[..., None]) -> Callable[..., None]:
        def note(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            with torch.utils._python_dispatch._disable_current_modes():
                launch(executor, *args, **kwargs)
            self._calls.append(lambda: launch(executor, *args, **kwargs))

        return note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        masks = func.overloadpacket is torch.ops.aten.index and any(x.dtype is torch.bool for x in inputs[1:])
        if func.overloadpacket in WAITS or masks:
            raise RuntimeError(f"{func} waits for the GPU, so a graph cannot record it")
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        owned = {x.untyped_storage().data_ptr() for x in inputs}
        new = [x.untyped_storage().data_ptr() not in owned for x in outputs]

        def repeat() -> None:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for output, other, own in zip(outputs, again, new, strict=True):
                if own:  # results in memory of the inputs are there already
                    output.copy_(other)

        self._calls.append(repeat)
        return result


@contextmanager
def installed(*, graphs: bool) -> Iterator[None]:
    """Replace CUDA's streams, events and graphs for engines on a CPU.

    Images are encoded, and blocks move to and from host memory, in stand-ins for streams of their own. All
    tokens of a step are chosen together.
    graphs: padded decodes are recorded, too.
    """

    def recorded(*arguments: Any, capture: bool) -> PaddedDecodes:
        return PaddedDecodes(*arguments, capture=graphs)

    def batched(*arguments: Any, **settings: Any) -> Sampler:
        return Sampler(*arguments, **settings | {"batched": True})

    def enter(stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    with (
        mock.patch.multiple(
            torch.cuda, Stream=Stream, Event=Event, CUDAGraph=Graph, graph=Recording, stream=enter,
            current_stream=lambda device=None: Stream(), graph_pool_handle=object,
        ),
        mock.patch.object(torch.Tensor, "record_stream"),
        mock.patch.object(assemble, "Sampler", batched),
        mock.patch.multiple(
            runner, encoder_stream=CudaStream, move_streams=CudaStreams, PaddedDecodes=recorded
        ),
    ):  # fmt: skip
        yield
