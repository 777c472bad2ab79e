"""Records one generation while its deltas pass: in the metrics, in its trace, and for the admin page."""

from __future__ import annotations

import time

from fovea.core.errors import EngineError, FoveaError
from fovea.core.types import Delta, GenerationRequest, Usage
from fovea.server.clients import Caller
from fovea.server.state import ServerState


class GenerationRecorder:
    """One generation that the engine has.

    media: images and videos of its prompt.
    """

    def __init__(self, state: ServerState, request: GenerationRequest, caller: Caller, media: int) -> None:
        self._metrics = state.metrics
        self._tracking = state.tracking
        self._in_flight = state.in_flight
        self._choices = choices = request.sampling.n
        self._trace_id = "" if state.trail is None else state.trail.recorded_id
        self._media_s = request.fetch_s + request.media_decode_s
        self._started = time.perf_counter()
        self._last: dict[int, float] = {}
        self._ended = False
        self._run = state.tracking.start(state.trail, request, state.client.info.name)
        self._flight = state.in_flight.enter(
            caller.request_id or request.id, caller.client.name, media, choices
        )
        self._metrics.begin_answer(choices, request.sampling.max_tokens)

    def add(self, delta: Delta) -> None:
        """Record a delta that comes now."""
        now, last = time.perf_counter(), self._last
        self._tracking.note(self._run, delta, now)
        if not last:
            seconds = self._media_s + now - self._started
            self._metrics.observe_first_token(seconds, self._trace_id)
            self._in_flight.begin_answer(self._flight, seconds)
        self._flight.tokens += len(delta.token_ids)
        self._ended = delta.usage is not None
        if delta.index in last and delta.token_ids:
            self._metrics.observe_gap(now - last[delta.index])
        last[delta.index] = now
        self._metrics.observe_delta(delta, self._choices, self._trace_id)

    def fail(self, error: Exception) -> None:
        """Record the error that ends the generation."""
        self._run.error = error.code if isinstance(error, FoveaError) else EngineError.default_code

    def end(self, cut: Usage | None) -> None:
        """Record the end, whatever has caused it. To be called once.

        cut: what a generation has used that did not reach its end; None: nothing, or it was recorded.
        """
        self._in_flight.leave(self._flight)
        if not self._ended:
            self._metrics.count_cut("error" if self._run.error else "abort", cut)
            self._run.error = self._run.error or "client_gone"
