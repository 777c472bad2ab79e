"""Streams whose work runs late, in any order that their events allow.

A GPU runs the work of different streams in an order that nobody knows. Here operations on tensors only queue
up in the current stream. `LateStreams.run` then runs them one by one: each time the oldest operation of any
stream that does not wait for an event. So code that forgets an event gives wrong numbers for some choices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {
    torch.ops.aten.select, torch.ops.aten.slice, torch.ops.aten.transpose, torch.ops.aten.alias,
    torch.ops.aten.detach, torch.ops.aten.detach_, torch.ops.aten.lift_fresh, torch.ops.aten.view,
}  # fmt: skip
Work = Callable[[], object]


class LateEvent:
    """A point in a stream. It is over when the work before it has run."""

    def __init__(self, stream: LateStream) -> None:
        self._over = False
        stream.work.append(self._end)

    def _end(self) -> None:
        self._over = True

    def query(self) -> bool:
        return self._over


class LateStream:
    """A queue of operations, and of events that it waits for."""

    def __init__(self) -> None:
        self.work: deque[Work | LateEvent] = deque()

    def wait_event(self, event: LateEvent) -> None:
        self.work.append(event)

    @property
    def ready(self) -> bool:
        """Whether something is queued, and it does not wait for an event."""
        while self.work and isinstance(self.work[0], LateEvent) and self.work[0].query():
            self.work.popleft()
        return bool(self.work) and not isinstance(self.work[0], LateEvent)


class LateStreams(TorchDispatchMode):
    """The streams of a device, and the operations that are launched while it is active.

    choose: chooses the next of so many streams, from 0 on.
    """

    def __init__(self, choose: Callable[[int], int]) -> None:
        super().__init__()
        self._choose = choose
        self._streams: list[LateStream] = []
        self._current = self.new()

    def new(self) -> LateStream:
        self._streams.append(LateStream())
        return self._streams[-1]

    def current(self) -> LateStream:
        return self._current

    def mark(self, stream: LateStream) -> LateEvent:
        return LateEvent(stream)

    @contextmanager
    def activate(self, stream: LateStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def launch(self, work: Work) -> None:
        """Queue work in the current stream."""
        self._current.work.append(work)

    def run(self, most: int | None = None) -> None:
        """Run the queued work, or so many pieces of it. Fails if streams wait for each other for ever."""
        with torch.utils._python_dispatch._disable_current_modes():
            while most is None or most > 0:
                ready = [stream for stream in self._streams if stream.ready]
                if not ready:
                    assert not any(stream.work for stream in self._streams), "an event never comes"
                    return
                work = ready[self._choose(len(ready))].work.popleft()
                assert not isinstance(work, LateEvent)
                work()
                most = None if most is None else most - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Views, and new tensors of numbers that the host knows, such as an index, are there at once.
        if func.overloadpacket in VIEWS or not any(isinstance(arg, Tensor) for arg in args):
            return func(*args, **kwargs)
        if func._schema.name.endswith("_") or "out" in kwargs:
            self.launch(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        result = torch.zeros_like(func(*args, **kwargs))
        self.launch(lambda: result.copy_(func(*args, **kwargs)))
        return result
