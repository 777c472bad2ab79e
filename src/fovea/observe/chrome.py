"""Converts spans to the Trace Event Format, which Perfetto and chrome://tracing display."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fovea.core.stage import Recorder

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
