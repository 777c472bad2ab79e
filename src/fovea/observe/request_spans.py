"""Makes the spans of one request of a server from its record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fovea.core.sampling import SamplingParams
from fovea.core.types import StageTimings, Usage
from fovea.observe import spans
from fovea.observe.request_log import Content, Interval, Run, Timeline
from fovea.observe.spans import Attribute, Span, TraceContext, new_span_id

_DEFAULTS = SamplingParams()
"""Spans hold only the parameters that differ from these."""
LONGEST_TEXT = 8192
"""Characters of a text in a span."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The end of a request: what is known when its response is complete.

    at: on the record's clock.
    route: the route's path, without parameters.
    status: of the response.
    caller: name of the client's key.
    """

    at: float
    request_id: str
    method: str
    route: str
    status: int
    caller: str
    stream: bool = False


def spans_of(timeline: Timeline, ended: RequestEnd, *, legacy: bool) -> Iterator[Span]:
    """Yield the spans of a request: one of the request, one per stage, and with several generations one each.

    legacy: whether spans have vLLM's attributes, too.
    """
    context = timeline.context
    if context is None:
        return
    shift = timeline.wall - timeline.started
    operation = spans.OPERATIONS.get(ended.route, "")
    model = timeline.runs[0].model if timeline.runs else ""
    name = f"{operation} {model}".strip() if operation else f"{ended.method} {ended.route}"
    several = len(timeline.runs) > 1
    attributes = _request_attributes(ended, operation, model)
    error = next((run.error for run in timeline.runs if run.error), "")
    if not several and timeline.runs:
        attributes |= run_attributes(timeline.runs[0], timeline, legacy=legacy)
    if ended.status >= 500 or error:
        attributes[spans.ERROR_TYPE] = error or str(ended.status)
    yield Span(
        name, context.trace_id, context.span_id, context.parent_id,
        timeline.wall, ended.at + shift, attributes, "server",
        error if error or ended.status < 500 else f"status {ended.status}", context.state,
    )  # fmt: skip
    for run in timeline.runs if several else ():
        span_id = new_span_id()
        end = run.last if run.last is not None else ended.at
        yield Span(
            f"{operation} {run.model}", context.trace_id, span_id, context.span_id,
            run.submitted + shift, end + shift, run_attributes(run, timeline, legacy=legacy),
            error=run.error, state=context.state,
        )  # fmt: skip
        yield from _stage_spans(run.stages(), context, span_id, shift)
    own = timeline.stages(ended.at)
    inner = {interval for run in timeline.runs for interval in run.stages()} if several else set()
    yield from _stage_spans((each for each in own if each not in inner), context, context.span_id, shift)


def _stage_spans(
    intervals: Iterator[Interval], context: TraceContext, parent: str, shift: float
) -> Iterator[Span]:
    for interval in intervals:
        yield Span(
            interval.stage, context.trace_id, new_span_id(), parent,
            interval.start + shift, interval.end + shift, state=context.state,
        )  # fmt: skip


def _request_attributes(ended: RequestEnd, operation: str, model: str) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        spans.HTTP_METHOD: ended.method,
        spans.HTTP_ROUTE: ended.route,
        spans.HTTP_STATUS: ended.status,
        spans.REQUEST_ID: ended.request_id,
        spans.CALLER: ended.caller,
    }
    if operation:
        attributes |= {spans.OPERATION: operation, spans.PROVIDER_NAME: spans.PROVIDER}
        attributes[spans.REQUEST_STREAM] = ended.stream
    if model:
        attributes |= {spans.REQUEST_MODEL: model, spans.RESPONSE_MODEL: model}
    return attributes


def run_attributes(run: Run, timeline: Timeline, *, legacy: bool) -> dict[str, Attribute]:
    """Return the attributes of one generation."""
    attributes: dict[str, Attribute] = {spans.RESPONSE_ID: run.id}
    for field, name in spans.SAMPLING.items():
        value = getattr(run.sampling, field)
        if value != getattr(_DEFAULTS, field):
            attributes[name] = value
    if run.first is not None:
        attributes[spans.FIRST_CHUNK] = run.first - timeline.started
    if run.reasons:
        attributes[spans.FINISH_REASONS] = list(run.reasons)
    if run.usage is not None:
        attributes |= _usage_attributes(run.usage)
    if run.sizes:
        attributes[spans.IMAGE_SIZES] = [f"{width}x{height}" for width, height in run.sizes]
    if run.images:
        attributes[spans.IMAGE_VISUAL_TOKENS] = [image.tokens for image in run.images]
        attributes[spans.IMAGE_DETAIL] = [image.detail for image in run.images]
    if run.content is not None:
        attributes |= _content_attributes(run.content)
    if legacy and run.usage is not None and run.timings is not None:
        attributes |= _legacy_attributes(run, timeline, run.usage, run.timings)
    return attributes


def _usage_attributes(usage: Usage) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        spans.INPUT_TOKENS: usage.prompt,
        spans.OUTPUT_TOKENS: usage.completion,
        spans.CACHED_TOKENS: usage.cached,
    }
    if usage.image:
        attributes[spans.IMAGE_TOKENS] = usage.image
    if usage.reasoning:
        attributes[spans.REASONING_TOKENS] = usage.reasoning
    return attributes


def _content_attributes(content: Content) -> dict[str, Attribute]:
    """Return the messages of a generation: one with the prompt, and one for the answer of each choice."""

    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "parts": [{"type": "text", "content": text[:LONGEST_TEXT]}]}

    answers = ["".join(pieces) for _, pieces in sorted(content.answers.items())]
    return {
        spans.INPUT_MESSAGES: json.dumps([message("user", content.prompt)]),
        spans.OUTPUT_MESSAGES: json.dumps([message("assistant", answer) for answer in answers]),
    }


def _legacy_attributes(
    run: Run, timeline: Timeline, usage: Usage, timings: StageTimings
) -> dict[str, Attribute]:
    total = (run.last or run.submitted) - timeline.started
    first = (run.first or run.submitted) - timeline.started
    values: dict[str, Attribute] = {
        "request_id": run.id, "num_sequences": run.sampling.n,
        "prompt_tokens": usage.prompt, "completion_tokens": usage.completion,
        "queue": timings.queue, "first_token": first, "total": total,
        "prefill": timings.prefill, "decode": timings.decode, "inference": timings.prefill + timings.decode,
    }  # fmt: skip
    return {spans.LEGACY[name]: value for name, value in values.items()}
