"""Profiles of a server from the spans that `core.measure` records: how much time each stage took.

*Busy* seconds of a stage are the seconds of all its spans without the spans nested in them. Under load
several threads are busy at once, so busy seconds can add up to more than the interval. *Path* seconds
divide the interval itself: every moment belongs to one stage. `chrome_trace` converts spans for Perfetto.
`watched_loop` is an event loop that records when it works.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.core.measure import Recorder, Span, active_recorder

STAGES = (
    "client", "server", "fetch", "image decode", "tokenize", "resize", "patchify", "schedule", "encoder",
    "projector", "prefill", "mixed step", "decode step", "head", "sampling", "detokenize",
)  # fmt: skip
"""The names of all spans, in the order in which a request passes through them."""
WAITING = "waiting"
"""No stage is active: a thread is being woken, or a socket transfers bytes."""
PRECEDENCE = (
    "projector", "encoder", "head", "sampling", "prefill", "mixed step", "decode step", "schedule",
    "resize", "patchify", "tokenize", "image decode", "fetch", "detokenize", "server", "client",
)  # fmt: skip
"""Stages by precedence: the model, then its thread, then preparation of its input, then the answer's text."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """The time of one stage in an interval.

    calls: spans that started in the interval.
    busy_s, path_s: seconds, as defined in the module's docstring.
    """

    stage: str
    calls: int
    busy_s: float
    path_s: float


def stage_times(spans: Iterable[Span], start: float, end: float) -> dict[str, StageTime]:
    """Return the time of each stage active in [start, end), in the order of STAGES, with "waiting" last."""
    within = [span for span in spans if span.start < end and span.end > start]
    segments = [
        (name, max(a, start), min(b, end)) for name, a, b in innermost(within) if a < end and b > start
    ]
    calls = Counter(span.name for span in within if span.start >= start)
    busy: dict[str, float] = defaultdict(float)
    for name, a, b in segments:
        busy[name] += b - a
    path = _path(segments, start, end)
    times = {name: StageTime(name, calls[name], busy[name], path[name]) for name in STAGES if name in busy}
    return times | {WAITING: StageTime(WAITING, 0, path[WAITING], path[WAITING])}


def innermost(spans: Iterable[Span]) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of the innermost spans: segments that do not overlap within a thread."""
    threads: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        threads[span.thread].append(span)
    segments: list[tuple[str, float, float]] = []
    for thread_spans in threads.values():
        segments += _segments(sorted(thread_spans, key=lambda span: (span.start, -span.end)))
    return [segment for segment in segments if segment[2] > segment[1]]


def _segments(spans: Sequence[Span]) -> Iterable[tuple[str, float, float]]:
    """Yield the segments of one thread. spans: outer ones before inner ones."""
    around: list[Span] = []
    at = 0.0
    for span in spans:
        while around and around[-1].end <= span.start:
            yield around[-1].name, at, around[-1].end
            at = around.pop().end
        if around:
            yield around[-1].name, at, span.start
        around.append(span)
        at = span.start
    while around:
        yield around[-1].name, at, around[-1].end
        at = around.pop().end


def _path(segments: Iterable[tuple[str, float, float]], start: float, end: float) -> dict[str, float]:
    changes = [(at, name, step) for name, a, b in segments for at, step in ((a, 1), (b, -1))]
    active: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    now = start
    for at, name, step in sorted(changes):
        seconds[_first(active)] += at - now
        active[name] += step
        now = at
    seconds[_first(active)] += end - now
    return seconds


def _first(active: Counter[str]) -> str:
    return next((name for name in PRECEDENCE if active[name] > 0), WAITING)


RequestSpan = tuple[str, float, float]
"""Name, start and end of a request; seconds on the recorder's clock."""


def chrome_trace(
    recorder: Recorder, requests: Iterable[RequestSpan] = (), about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a trace: a complete event per span, a track per thread, an asynchronous event per request.

    about: metadata of the trace.
    Times are microseconds from the start of the first span.
    """
    origin = min((span.start for span in recorder.spans), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": name}}
        for thread, name in recorder.threads.items()
    ]
    # Viewers nest the events of a track in the order of the file, so an outer span must come before its inner
    # spans.
    for span in sorted(recorder.spans, key=lambda span: (span.start, -span.end)):
        events.append(
            {
                "ph": "X", "name": span.name, "cat": "stage", "pid": 1, "tid": span.thread,
                "ts": _micro(span.start - origin), "dur": _micro(span.end - span.start),
                "args": dict(span.notes),
            }
        )  # fmt: skip
    for number, (name, start, end) in enumerate(requests):
        shared = {"name": name, "cat": "request", "pid": 1, "tid": 0, "id": number}
        events.append({"ph": "b", **shared, "ts": _micro(start - origin)})
        events.append({"ph": "e", **shared, "ts": _micro(end - origin)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


class _Selector(selectors.DefaultSelector):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._awake_since: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        recorder = active_recorder()
        if recorder is not None and self._awake_since is not None:
            recorder.add(self._name, self._awake_since, recorder.clock())
        events = super().select(timeout)
        recorder = active_recorder()
        self._awake_since = None if recorder is None else recorder.clock()
        return events


def watched_loop(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return a factory of event loops whose work is recorded in spans of that name."""
    return lambda: asyncio.SelectorEventLoop(_Selector(name))
