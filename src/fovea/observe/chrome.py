"""Spans in the Trace Event Format, which Perfetto and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fovea.core.stage import Recorder

Timed = tuple[str, float, float]
"""Name, start and end of a request, seconds on the recorder's clock."""


def chrome_trace(
    recorder: Recorder, requests: Iterable[Timed] = (), about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A complete event per span, a track per thread, an asynchronous event per request; microseconds from the first span on."""
    began = min((span.start for span in recorder.spans), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": name}}
        for thread, name in recorder.threads.items()
    ]
    # Viewers nest events of one track in the order of the file: whoever starts first, and lasts longest, is outside.
    for span in sorted(recorder.spans, key=lambda span: (span.start, -span.end)):
        events.append(
            {
                "ph": "X", "name": span.name, "cat": "stage", "pid": 1, "tid": span.thread,
                "ts": _micro(span.start - began), "dur": _micro(span.end - span.start), "args": dict(span.notes),
            }
        )  # fmt: skip
    for number, (name, start, end) in enumerate(requests):
        shared = {"name": name, "cat": "request", "pid": 1, "tid": 0, "id": number}
        events.append({"ph": "b", **shared, "ts": _micro(start - began)})
        events.append({"ph": "e", **shared, "ts": _micro(end - began)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
