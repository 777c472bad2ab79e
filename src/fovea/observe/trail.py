"""The trail of one HTTP request: its times, amounts and images, for traces and for the log of slow requests.

A trail holds no text, no bytes and no query string, unless traces are to hold content (`trace_content`).
Times are seconds of `time.perf_counter`, which on Linux is also the engine's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fovea.core.image import ImageUse
from fovea.core.sampling import SamplingParams
from fovea.core.types import StageTimings, Usage
from fovea.observe.tracing.context import TraceContext

STAGES = (
    "receive", "fetch", "media_decode", "preprocess", "queue", "encode", "prefill", "decode", "detokenize",
    "respond",
)  # fmt: skip
"""Names of the stages of a request in a server, in order."""


class Interval(NamedTuple):
    """The time of one stage of a request. start, end: seconds of the trail's clock."""

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
        for name, seconds in (
            ("media_decode", timings.media_decode - self.media_decode_s),
            ("preprocess", timings.preprocess),
            ("queue", timings.queue),
            ("encode", timings.encode),
            ("prefill", timings.prefill),
            ("decode", timings.decode - timings.detokenize),
            ("detokenize", timings.detokenize),
        ):
            if seconds > 0:
                yield Interval(name, at, at + seconds)
                at += seconds


@dataclass(slots=True)
class Trail:
    """One HTTP request.

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

    def longest(self) -> Trail:
        """Return this trail with the generation that ended last alone: others ran beside it."""
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
            return [
                Interval("receive", self.started, self.loading),
                Interval("fetch", self.loading, ended),
            ]
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
