"""Follows the requests of a server: those that the engine has now, their traces, and the slow ones.

The page for operators shows what the engine has and the latest times to first token. A generation is known
from the moment at which it is handed to the engine until its answer ends. Nothing of its content is kept.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fovea.core.types import ChatPrompt, Delta, GenerationRequest, ImagePart, Prompt, TextPart, TextPrompt
from fovea.observe.request_log import Content, Run, SlowRequests, Timeline, row_of, ttft_of
from fovea.observe.request_spans import LONGEST_TEXT, RequestEnd, spans_of
from fovea.observe.spans import parent_of, recorded_id
from fovea.observe.tracer import Tracer

if TYPE_CHECKING:  # a generation is tracked here
    from fovea.server.generation import Generation

SAMPLES = 1024
"""Times to first token that are kept at most."""


class InFlight:
    """All generations that the engine has. Not thread-safe: use it from the event loop's thread.

    first_tokens, first_token_seconds: number and sum of the times to first token since the server started.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.first_tokens = 0
        self.first_token_seconds = 0.0
        self._entered = 0
        self._generations: dict[Generation, None] = {}
        self._latest: deque[tuple[float, float]] = deque(maxlen=SAMPLES)

    def __len__(self) -> int:
        return len(self._generations)

    def __iter__(self) -> Iterator[Generation]:
        """Iterate over the generations, oldest first."""
        return iter(self._generations)

    def add(self, generation: Generation) -> int:
        """Add a generation that is handed to the engine now, and return its number."""
        self._entered += 1
        self._generations[generation] = None
        return self._entered

    def remove(self, generation: Generation) -> None:
        """Remove a generation that has ended."""
        del self._generations[generation]

    def count_first_token(self, seconds: float) -> None:
        """Count a time to first token: seconds from the request's arrival until now."""
        self.first_tokens += 1
        self.first_token_seconds += seconds
        self._latest.append((self.clock(), seconds))

    def per_caller(self) -> Counter[str]:
        """Return how many generations each client has."""
        return Counter(generation.caller for generation in self._generations)

    def first_token_times(self, window_s: float) -> list[float]:
        """Return the times to first token of the last `window_s` seconds in ascending order.

        At most SAMPLES of them are kept.
        """
        since = self.clock() - window_s
        return sorted(seconds for at, seconds in self._latest if at >= since)


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of the values does not exceed; None without values.

    ordered: the values, ascending.
    """
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Tracking:
    """The timelines of one server's requests.

    slow: the log of slow requests.
    tracer: exports the traces; None: nothing is traced.
    """

    def __init__(self, slow: SlowRequests, tracer: Tracer | None) -> None:
        self.slow = slow
        self.tracer = tracer
        self._content = tracer is not None and tracer.settings.trace_content

    def begin(self, headers: Mapping[bytes, bytes]) -> Timeline:
        """Begin the timeline of a request that arrives now."""
        parent = parent_of(headers)
        context = None if self.tracer is None else self.tracer.begin(headers, parent)
        return Timeline(time.perf_counter(), time.time(), context, recorded_id(context, parent))

    def start(self, timeline: Timeline, request: GenerationRequest, model: str) -> Run:
        """Note that the engine gets a generation now. timeline: that of its HTTP request."""
        run = Run(
            request.id,
            model,
            request.sampling,
            time.perf_counter(),
            request.fetch_s,
            request.media_decode_s,
            _sizes(request.prompt),
        )
        timeline.runs.append(run)
        if self._content and timeline.context is not None:
            run.content = Content(_text(request.prompt))
        return run

    def note(self, run: Run, delta: Delta, now: float) -> None:
        """Note a delta of a generation. now: when it came."""
        if run.first is None:
            run.first = now
        run.last = now
        if delta.finish_reason is not None:
            run.reasons.append(delta.finish_reason)
        if delta.usage is not None:
            run.usage, run.timings, run.images = delta.usage, delta.timings, delta.images
        if run.content is not None:
            pieces = run.content.answers.setdefault(delta.index, [])
            if len(pieces) < LONGEST_TEXT:
                pieces.append(delta.text)

    def finish(self, timeline: Timeline, ended: RequestEnd) -> None:
        """Record a request whose response is complete."""
        if self.slow.is_slow(ended.at - timeline.started, ttft_of(timeline)):
            self.slow.add(
                row_of(
                    timeline,
                    ended.at,
                    request_id=ended.request_id,
                    route=ended.route,
                    caller=ended.caller,
                    status=ended.status,
                )
            )
        tracer = self.tracer
        if tracer is not None and timeline.context is not None:
            legacy = tracer.settings.trace_legacy_names
            tracer.finish(lambda: spans_of(timeline, ended, legacy=legacy))

    def stats(self) -> dict[str, float]:
        """Figures for the metrics."""
        return {} if self.tracer is None else self.tracer.stats()

    def close(self) -> None:
        """Export the last traces."""
        if self.tracer is not None:
            self.tracer.close()


def _sizes(prompt: Prompt) -> tuple[tuple[int, int], ...]:
    if not isinstance(prompt, ChatPrompt):
        return ()
    parts = (part for message in prompt.messages for part in message.parts)
    return tuple((part.image.width, part.image.height) for part in parts if isinstance(part, ImagePart))


def _text(prompt: Prompt) -> str:
    """The text of a prompt, for traces that hold content."""
    if isinstance(prompt, ChatPrompt):
        parts = (part for message in prompt.messages for part in message.parts)
        return "\n".join(part.text for part in parts if isinstance(part, TextPart))[:LONGEST_TEXT]
    return prompt.text[:LONGEST_TEXT] if isinstance(prompt, TextPrompt) else ""
