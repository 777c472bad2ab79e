"""Measures the projector's part of a slice of the encoder.

The projector is called deep inside an encoder's generator. So the queue that runs the slices makes a timer
current, and `as_projector` sets a mark before and after every call. Marks are those of `vision.stream`: a
look at the clock on a CPU, an event on CUDA, about two per image.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from fovea.engine.vision.stream import EncoderStream, Mark


class ProjectorCall(NamedTuple):
    """A call of a projector, by the marks before and after it."""

    begin: Mark
    end: Mark

    @property
    def seconds(self) -> float:
        """Duration of the call. Both marks must be done."""
        return self.end.since(self.begin)


class ProjectorTimer:
    """The calls of a projector in the slices of one encoder stream."""

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
