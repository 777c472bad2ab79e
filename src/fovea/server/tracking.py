"""Follows the requests of a server, and makes traces and the log of slow requests from their trails."""

from __future__ import annotations

import time
from collections.abc import Mapping

from fovea.core.types import ChatPrompt, Delta, GenerationRequest, ImagePart, Prompt, TextPart, TextPrompt
from fovea.observe.slow import SlowRequests, row_of, ttft_of
from fovea.observe.tracing.context import parent_of, recorded_id
from fovea.observe.tracing.request import LONGEST_TEXT, RequestEnd, spans_of
from fovea.observe.tracing.tracer import Tracer
from fovea.observe.trail import Content, Run, Trail


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
