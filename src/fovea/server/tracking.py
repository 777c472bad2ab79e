"""Follows the requests of a server, and makes traces and the log of slow requests from their trails."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from fovea.core.types import ChatPrompt, Delta, GenerationRequest, ImagePart, Prompt, TextPart, TextPrompt
from fovea.observe.slow import SlowRequests, row_of, ttft_of
from fovea.observe.tracing.context import parent_of, recorded_id
from fovea.observe.tracing.request import LONGEST_TEXT, RequestEnd, spans_of
from fovea.observe.tracing.tracer import Tracer
from fovea.observe.trail import Content, Run, Trail

SAMPLES = 1024
"""Times to first token that are kept at most."""


class Flight:
    """One request that the engine has.

    number: differs from that of all other requests since the server started.
    id: its request id, which logs and responses name, too.
    caller: name of its client.
    images: images and videos in its prompt.
    choices: answers that it asks for.
    started: time of the clock at which the engine got it.
    tokens: tokens that were generated so far, of all choices.
    generating: whether it has its first token.
    """

    __slots__ = ("caller", "choices", "generating", "id", "images", "number", "started", "tokens")

    def __init__(self, number: int, id: str, caller: str, images: int, choices: int, started: float) -> None:
        self.number = number
        self.id = id
        self.caller = caller
        self.images = images
        self.choices = choices
        self.started = started
        self.tokens = 0
        self.generating = False


class InFlight:
    """All requests that the engine has. Not thread-safe: use it from the event loop's thread.

    first_tokens, first_token_seconds: number and sum of the times to first token since the server started.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.first_tokens = 0
        self.first_token_seconds = 0.0
        self._entered = 0
        self._flights: dict[Flight, None] = {}
        self._latest: deque[tuple[float, float]] = deque(maxlen=SAMPLES)

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        """Iterate over the requests, oldest first."""
        return iter(self._flights)

    def enter(self, id: str, caller: str, images: int, choices: int) -> Flight:
        """Add a request that is handed to the engine now."""
        self._entered += 1
        flight = Flight(self._entered, id, caller, images, choices, self.clock())
        self._flights[flight] = None
        return flight

    def leave(self, flight: Flight) -> None:
        """Remove a request whose answer has ended."""
        del self._flights[flight]

    def begin_answer(self, flight: Flight, seconds: float) -> None:
        """Note that a request has its first token. seconds: time from its arrival until now."""
        flight.generating = True
        self.first_tokens += 1
        self.first_token_seconds += seconds
        self._latest.append((self.clock(), seconds))

    def per_caller(self) -> Counter[str]:
        """Return how many requests each client has."""
        return Counter(flight.caller for flight in self._flights)

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
    """The trails of one server's requests.

    slow: the log of slow requests.
    tracer: exports the traces; None: nothing is traced.
    """

    def __init__(self, slow: SlowRequests, tracer: Tracer | None) -> None:
        self.slow = slow
        self.tracer = tracer
        self._content = tracer is not None and tracer.settings.trace_content

    def begin(self, headers: Mapping[bytes, bytes]) -> Trail:
        """Begin the trail of a request that arrives now."""
        parent = parent_of(headers)
        context = None if self.tracer is None else self.tracer.begin(headers, parent)
        return Trail(time.perf_counter(), time.time(), context, recorded_id(context, parent))

    def start(self, trail: Trail | None, request: GenerationRequest, model: str) -> Run:
        """Note that the engine gets a generation now. trail: of its HTTP request; None: it has none."""
        run = Run(
            request.id,
            model,
            request.sampling,
            time.perf_counter(),
            request.fetch_s,
            request.media_decode_s,
            _sizes(request.prompt),
        )
        if trail is not None:
            trail.runs.append(run)
            if self._content and trail.context is not None:
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

    def finish(self, trail: Trail, ended: RequestEnd) -> None:
        """Record a request whose response is complete."""
        if self.slow.is_slow(ended.at - trail.started, ttft_of(trail)):
            self.slow.add(
                row_of(
                    trail,
                    ended.at,
                    request_id=ended.request_id,
                    route=ended.route,
                    caller=ended.caller,
                    status=ended.status,
                )
            )
        tracer = self.tracer
        if tracer is not None and trail.context is not None:
            legacy = tracer.settings.trace_legacy_names
            tracer.finish(lambda: spans_of(trail, ended, legacy=legacy))

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
