"""What takes time says so here, for whoever listens.

    with stage("resize"):
        ...

Usually nobody does, and a span is one look at a variable. Listening is for the whole process, like a log: what takes time
is deep inside functions that know nothing of who asked. `fovea profile` listens; see docs/profiling.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

Notes = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Span:
    """start, end: seconds on the recorder's clock. thread: its identifier. notes: counts that say how much was done."""

    name: str
    start: float
    end: float
    thread: int
    notes: Notes = field(default_factory=dict)


class Recorder:
    """Spans of all threads, each entered when it ends.

    ending: called with a span's name before its end is taken; where work is only launched, it waits for the device.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        ending: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.spans: list[Span] = []
        self.threads: dict[int, str] = {}
        self.clock = clock
        self.ending = ending

    def add(self, name: str, start: float, end: float, notes: Notes | None = None) -> None:
        """A span of the calling thread that is over. Appending needs no lock."""
        thread = threading.get_ident()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        self.spans.append(Span(name, start, end, thread, notes or {}))


class _Open:
    __slots__ = ("_name", "_notes", "_recorder", "_start")

    def __init__(self, recorder: Recorder, name: str, notes: Notes) -> None:
        self._recorder = recorder
        self._name = name
        self._notes = notes

    def __enter__(self) -> None:
        self._start = self._recorder.clock()

    def __exit__(self, *exc: object) -> None:
        self._recorder.ending(self._name)
        self._recorder.add(self._name, self._start, self._recorder.clock(), self._notes)


NO_SPAN: AbstractContextManager[None] = nullcontext()
_listener: Recorder | None = None


def active_recorder() -> Recorder | None:
    """Who listens now: for notes that take time to count."""
    return _listener


def stage(name: str, **notes: float) -> AbstractContextManager[None]:
    """What happens inside, by name, if anybody listens."""
    return NO_SPAN if _listener is None else _Open(_listener, name, notes)


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Raises RuntimeError when somebody listens already."""
    global _listener
    if _listener is not None:
        raise RuntimeError("somebody listens already; one recorder at a time")
    _listener = recorder
    try:
        yield recorder
    finally:
        _listener = None
