"""Measurement of a running program: stages marked in the code, histograms, percentiles.

    with stage("resize"):
        ...

marks a stage, so that a profiler can record how long it takes. Usually no recorder is active, and a stage
costs one look at a variable. The recorder is global to the process, as a log is: the work happens deep inside
functions that know nothing of the profiler. `fovea profile` sets a recorder; see docs/profiling.md.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

Notes = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of time in which one thread did the work of one stage.

    start, end: seconds on the recorder's clock.
    thread: identifier of the thread.
    notes: counts that say how much work was done.
    """

    name: str
    start: float
    end: float
    thread: int
    notes: Notes = field(default_factory=dict)


class Recorder:
    """A list of the spans of all threads; a span is added when it ends.

    clock: returns the time in seconds.
    before_end: called with a span's name before its end is measured. It can wait for a device that works
        asynchronously.
    threads: names of the threads, by identifier.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        before_end: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.spans: list[Span] = []
        self.threads: dict[int, str] = {}
        self.clock = clock
        self.before_end = before_end

    def add(self, name: str, start: float, end: float, notes: Notes | None = None) -> None:
        """Add a finished span of the calling thread. Thread-safe: appending to a list needs no lock."""
        thread = threading.get_ident()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        self.spans.append(Span(name, start, end, thread, notes or {}))


class _OpenSpan:
    __slots__ = ("_name", "_notes", "_recorder", "_start")

    def __init__(self, recorder: Recorder, name: str, notes: Notes) -> None:
        self._recorder = recorder
        self._name = name
        self._notes = notes

    def __enter__(self) -> None:
        self._start = self._recorder.clock()

    def __exit__(self, *exc: object) -> None:
        self._recorder.before_end(self._name)
        self._recorder.add(self._name, self._start, self._recorder.clock(), self._notes)


NO_SPAN: AbstractContextManager[None] = nullcontext()
"""The context of every stage while no recorder is active."""
_recorder: Recorder | None = None


def active_recorder() -> Recorder | None:
    """Return the recorder that is active now, so that a caller can skip the counting of notes without one."""
    return _recorder


def stage(name: str, **notes: float) -> AbstractContextManager[None]:
    """Return a context whose duration is recorded as a span of that name, if a recorder is active."""
    return NO_SPAN if _recorder is None else _OpenSpan(_recorder, name, notes)


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Make a recorder active within the context. Raises RuntimeError if another one is active."""
    global _recorder
    if _recorder is not None:
        raise RuntimeError("another recorder is active; only one may be at a time")
    _recorder = recorder
    try:
        yield recorder
    finally:
        _recorder = None


def bucket_key(name: str, upper: float) -> str:
    """Return the name of the figure: values up to a bucket's upper bound. inf: all values."""
    return f"{name}_le_{upper:g}"


def sum_key(name: str) -> str:
    """Return the name of the figure: sum of all values."""
    return f"{name}_sum"


def keys_of(name: str, uppers: Sequence[float]) -> tuple[str, ...]:
    """Return the names of all figures of a histogram."""
    return (*(bucket_key(name, upper) for upper in (*uppers, math.inf)), sum_key(name))


class Tally:
    """Counts values by bucket.

    uppers: upper bounds of the buckets, ascending. A value equal to a bound belongs to its bucket. A last
        bucket has no bound.
    """

    __slots__ = ("_counts", "_keys", "_sum", "_sum_key", "_uppers")

    def __init__(self, name: str, uppers: Sequence[float]) -> None:
        self._uppers = tuple(uppers)
        *self._keys, self._sum_key = keys_of(name, uppers)
        self._counts = [0] * len(self._keys)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._uppers, value)] += 1
        self._sum += value

    def stats(self) -> Mapping[str, float]:
        """Return the cumulative counts and the sum by the names of `bucket_key` and `sum_key`."""
        figures: dict[str, float] = {self._sum_key: self._sum}
        below = 0
        for key, count in zip(self._keys, self._counts.copy(), strict=True):
            below += count
            figures[key] = below
        return figures


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile by the nearest-rank method; nan if there are no values.

    ordered: values in ascending order.
    percent: part of the values that do not exceed the result, in percent, 0 to 100.
    """
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
