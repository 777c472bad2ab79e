"""The record of one HTTP request (its times, amounts and images), and the log of slow requests.

A record holds no text, no bytes and no query string, unless traces are to hold content (`trace_content`), and
a row of the log never does. Times are seconds of `time.perf_counter`, which on Linux is also the engine's
clock.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from fovea.core.media import ImageUse
from fovea.core.sampling import SamplingParams
from fovea.core.types import StageTimings, Usage
from fovea.observe.spans import TraceContext

STAGES = (
    "receive", "fetch", "media_decode", "preprocess", "queue", "encode", "prefill", "decode", "detokenize",
    "respond",
)  # fmt: skip
"""Names of the stages of a request in a server, in order."""


class Interval(NamedTuple):
    """The time of one stage of a request. start, end: seconds of the record's clock."""

    stage: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start


@dataclass(slots=True)
class Content:
    """Texts of a generation, if traces are to hold content.

    answers: the text of each choice, in the pieces in which it came.
    """

    prompt: str = ""
    answers: dict[int, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """One generation of a request.

    submitted: when the engine got it.
    fetch_s, media_decode_s: seconds before that, as in GenerationRequest.
    sizes: (width, height) of its images.
    first, last: when its first and its last delta came; None: none came.
    timings, usage, images: of the last delta; None and (): it did not come.
    reasons: why its choices ended.
    error: code of the error that ended it; "": none.
    """

    id: str
    model: str
    sampling: SamplingParams
    submitted: float
    fetch_s: float = 0.0
    media_decode_s: float = 0.0
    sizes: tuple[tuple[int, int], ...] = ()
    first: float | None = None
    last: float | None = None
    timings: StageTimings | None = None
    usage: Usage | None = None
    images: tuple[ImageUse, ...] = ()
    reasons: list[str] = field(default_factory=list)
    error: str = ""
    content: Content | None = None

    def stages(self) -> Iterator[Interval]:
        """Yield the stages within the engine, laid out one after another.

        Their durations are exact. Their places are not always: an image may be encoded in several pieces
        between steps for other requests, and text is made from tokens after every step. Such a stage is shown
        as one interval.
        """
        timings = self.timings
        if timings is None:
            return
        at = self.submitted
        for name in ("media_decode", "preprocess", "queue", "encode", "prefill", "decode", "detokenize"):
            seconds = getattr(timings, name)
            if name == "media_decode":
                seconds -= self.media_decode_s
            elif name == "decode":
                seconds -= timings.detokenize
            if seconds > 0:
                yield Interval(name, at, at + seconds)
                at += seconds


@dataclass(slots=True)
class Timeline:
    """The moments of one HTTP request, and its generations.

    started: when it arrived. wall: the same moment in seconds since 1970.
    context: its place in a trace; None: it is not traced.
    trace_id: id of the trace that the client named, or of its own; "": there is none.
    loading: when the loading of its images began; None: there are none.
    runs: its generations.
    """

    started: float
    wall: float
    context: TraceContext | None = None
    trace_id: str = ""
    loading: float | None = None
    runs: list[Run] = field(default_factory=list)

    @property
    def recorded_id(self) -> str:
        """The trace id if the trace is recorded here, for exemplars; otherwise ""."""
        return "" if self.context is None else self.context.trace_id

    def longest(self) -> Timeline:
        """Return this timeline with only the generation that ended last: others ran beside it."""
        ended = [run for run in self.runs if run.last is not None]
        if len(self.runs) < 2 or not ended:
            return self
        return replace(self, runs=[max(ended, key=lambda run: run.last or 0.0)])

    def stages(self, ended: float) -> list[Interval]:
        """Return the stages of the request, those of its generations included.

        ended: when the response was complete.
        """
        if not self.runs:
            if self.loading is None:
                return [Interval("receive", self.started, ended)]
            # The images could not be loaded. How much of the time was decoding is not known.
            return [Interval("receive", self.started, self.loading), Interval("fetch", self.loading, ended)]
        first = self.runs[0]
        loading = first.submitted if self.loading is None else self.loading
        stages = [Interval("receive", self.started, loading)]
        at = loading
        for name, seconds in (("fetch", first.fetch_s), ("media_decode", first.media_decode_s)):
            if seconds > 0:
                stages.append(Interval(name, at, at + seconds))
                at += seconds
        for run in self.runs:
            stages += run.stages()
        last = max((run.last for run in self.runs if run.last is not None), default=None)
        if last is not None and ended > last:
            stages.append(Interval("respond", last, ended))
        return stages


log = logging.getLogger("fovea.slow")
MOST_ROWS = 100
"""Most rows that are kept for the admin page."""
MOST_IMAGES = 16
"""Most images in a row."""
LARGE_SHARE = 0.25
"""A stage that takes this share of a request's time, or more, is named as a reason."""
_CAUSES = {
    "receive": "the request arrived slowly, or was large to parse",
    "fetch": "its images came from slow hosts",
    "media_decode": "its images or videos took long to decode",
    "preprocess": "its images took long to resize, or waited for a thread that does it",
    "queue": "it waited in the queue: other requests held the engine or its memory",
    "encode": "its images took long to encode",
    "prefill": "its prompt took long to compute, or shared steps with other prompts",
    "decode": "its answer was long, or shared steps with many others",
    "detokenize": "its tokens took long to become text",
    "respond": "the client read its answer slowly",
}


class SlowRequests:
    """The latest slow requests.

    total_s: a request that takes so many seconds is slow; 0: none is.
    ttft_s: a request whose first token takes so many seconds is slow; 0: none is.
    """

    def __init__(self, total_s: float, ttft_s: float) -> None:
        self._total_s = total_s
        self._ttft_s = ttft_s
        self._rows: deque[dict[str, Any]] = deque(maxlen=MOST_ROWS)

    def is_slow(self, total_s: float, ttft_s: float | None) -> bool:
        """Tell whether a request was slow. ttft_s: seconds to its first token; None: it got none."""
        if self._total_s and total_s >= self._total_s:
            return True
        return bool(self._ttft_s and ttft_s is not None and ttft_s >= self._ttft_s)

    def add(self, row: dict[str, Any]) -> None:
        """Keep and log a slow request."""
        self._rows.append(row)
        log.warning("slow request: %s", json.dumps(row), extra={"event": "slow request", "fields": row})

    def rows(self) -> list[dict[str, Any]]:
        """Return the kept rows, the latest first."""
        return list(reversed(self._rows))


def row_of(
    timeline: Timeline, ended: float, *, request_id: str, route: str, caller: str, status: int
) -> dict[str, Any]:
    """Return the row of one request."""
    stages: dict[str, float] = {}
    for interval in timeline.longest().stages(ended):
        stages[interval.stage] = stages.get(interval.stage, 0.0) + interval.seconds
    total, ttft = ended - timeline.started, ttft_of(timeline)
    usage = [run.usage for run in timeline.runs if run.usage is not None]
    return {
        "time": datetime.fromtimestamp(timeline.wall, UTC).isoformat(timespec="milliseconds"),
        "request_id": request_id,
        "trace_id": timeline.trace_id,
        "route": route,
        "status": status,
        "model": timeline.runs[0].model if timeline.runs else "",
        "caller": caller,
        "seconds": round(total, 4),
        "ttft_seconds": None if ttft is None else round(ttft, 4),
        "stages": {name: round(seconds, 4) for name, seconds in stages.items()},
        "prompt_tokens": sum(each.prompt for each in usage),
        "cached_tokens": sum(each.cached for each in usage),
        "completion_tokens": sum(each.completion for each in usage),
        "images": [image for run in timeline.runs for image in _images(run)][:MOST_IMAGES],
        "reasons": reasons(stages, total, timeline.runs),
    }


def ttft_of(timeline: Timeline) -> float | None:
    """Return the seconds to the first token of the slowest generation; None: none got a token."""
    firsts = [run.first - timeline.started for run in timeline.runs if run.first is not None]
    return max(firsts, default=None)


def reasons(stages: Mapping[str, float], total: float, runs: Sequence[Run]) -> list[str]:
    """Say why a request took its time, the largest part first.

    stages: seconds by stage.
    total: seconds of the request.
    runs: its generations; none: it failed before the engine got it, or its route generates nothing.
    """
    usage = [run.usage for run in runs if run.usage is not None]
    found = stage_reasons(stages, total, _CAUSES)
    prompt, cached = sum(each.prompt for each in usage), sum(each.cached for each in usage)
    if prompt >= 1024 and cached < prompt / 2:
        found.append(f"{prompt - cached} of {prompt} prompt tokens were not cached")
    visual = sum(image.tokens for run in runs for image in run.images)
    if visual >= 1024:
        found.append(f"its images have {visual} visual tokens")
    if len(usage) < len(runs):
        found.append("it ended before its answer was complete")
    return found


def stage_reasons(stages: Mapping[str, float], total: float, causes: Mapping[str, str]) -> list[str]:
    """Return a sentence for each stage that took a large share of a request's time, the longest first.

    stages: seconds by stage.
    total: seconds of the request.
    causes: what makes a stage slow, by stage.
    """
    return [
        f"{name} took {seconds:.3g} s ({seconds / total:.0%}): {causes[name]}"
        for name, seconds in sorted(stages.items(), key=lambda item: -item[1])
        if total > 0 and seconds >= LARGE_SHARE * total
    ]


def _images(run: Run) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for index, (width, height) in enumerate(run.sizes):
        row: dict[str, Any] = {"width": width, "height": height}
        if index < len(run.images):
            use = run.images[index]
            row |= {"tokens": use.tokens, "detail": use.detail, "detail_reason": use.reason}
        rows.append(row)
    return rows
