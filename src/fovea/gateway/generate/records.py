"""Records of a request that has ended: metrics, usage, its trace, slow requests, and the audit log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, get_args

from fovea.access.audit import Audit
from fovea.access.keys import digest, fingerprint
from fovea.gateway.metrics import Metrics
from fovea.gateway.usage.log import ServedFrom, UsageLog, UsageRecord
from fovea.gateway.usage.prices import NOTHING
from fovea.observe import spans
from fovea.observe.request_log import MOST_IMAGES, SlowRequests, stage_reasons
from fovea.observe.spans import (
    Attribute,
    Span,
    SpanEvent,
    TraceContext,
    new_span_id,
    parent_of,
    recorded_id,
    unrecorded,
)
from fovea.observe.tracer import Tracer

if TYPE_CHECKING:
    from fovea.gateway.generate.request import Request

MILLION = 1_000_000
Stage = Literal["receive", "inspect", "cache", "limits", "queue", "forward"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""Stages of a request in a gateway, in order. The answer from the response cache ends after `cache`."""
_CAUSES = {
    "receive": "the request arrived slowly",
    "inspect": "its images were slow to read, or came from slow hosts",
    "cache": "the response cache was slow, or it waited for an equal request",
    "limits": "the accounts of tenants were slow",
    "queue": "it waited for a backend with room",
    "forward": "its backend took the time; the trace and the backend's own log tell more",
}


@dataclass(eq=False)
class Records:
    """The records of one worker.

    usage: None: no usage is recorded.
    tracer: None: no traces are recorded.
    slow: the latest slow requests.
    """

    metrics: Metrics
    usage: UsageLog | None
    audit: Audit
    slow: SlowRequests
    tracer: Tracer | None
    now: Callable[[], float] = time.time

    def stats(self) -> dict[str, float]:
        """Figures of the export of traces, for the metrics."""
        return {} if self.tracer is None else self.tracer.stats()

    def close(self) -> None:
        """Write and export what is left. May take seconds."""
        if self.usage is not None:
            self.usage.close()
        self.audit.close()
        if self.tracer is not None:
            self.tracer.close()

    def enter(self, request: Request, ended: float) -> None:
        """Record a request. ended: time of the gateway's clock."""
        self._count(request, ended)
        if self.usage is not None and request.model is not None:
            self.usage.add(self._usage_of(request, ended))
        if self.audit.on:
            self.audit.answered(self.now(), _audited(request, ended))
        if self.slow.is_slow(ended - request.started, request.stream_began_s):
            self.slow.add(row_of(request, ended))
        trace, code = request.trace, request.code
        if self.tracer is not None and trace.context is not None:
            root, forward = _attributes(request), _forward_attributes(request)
            name = f"{root[spans.OPERATION]} {request.asked}".strip()
            self.tracer.finish(lambda: spans_of(trace, ended, name, root, forward, code))

    def _count(self, request: Request, ended: float) -> None:
        """Add the request to the metrics."""
        metrics, used, won = self.metrics, request.consumption or NOTHING, request.won
        model = metrics.models(request.model.name if request.model is not None else "unknown")
        tenant = metrics.tenants(request.tenant.name)
        context = request.trace.context
        trace_id = "" if context is None else context.trace_id
        metrics.count("requests", request.api, model, tenant, str(request.outcome))
        metrics.observe("request_seconds", ended - request.started, model, trace_id=trace_id)
        if request.waited_s:
            metrics.observe("waiting_seconds", request.waited_s, model)
        if request.cached:
            metrics.count("cache", request.cached)
        if won is not None:
            metrics.count("attempts", won.backend.name, "answered")
            metrics.count("routes", won.reason)
            metrics.observe("first_byte_seconds", won.first_byte_s, won.backend.name, trace_id=trace_id)
        for kind, count in (
            ("prompt", used.prompt_tokens),
            ("visual", used.visual_tokens),
            ("cached", used.cached_tokens),
            ("completion", used.completion_tokens),
        ):
            if count:
                metrics.count("tokens", tenant, kind, by=count)
        if request.price.cost:
            metrics.count("cost", tenant, by=request.price.cost / MILLION)

    def _usage_of(self, request: Request, ended: float) -> UsageRecord:
        assert request.model is not None
        backend, model, reason = source_of(request)
        served: ServedFrom = "backend"
        if request.is_stored:
            served = "response_cache"
        elif reason.startswith(("retry", "fallback")):
            served = "fallback"
        failed = (request.outcome >= 400 and not request.gone) or request.code in (
            "stream_broken",
            "own_error",
        )
        return UsageRecord(
            self.now(), request.tenant.name, model or request.model.name, backend, served, failed,
            request.consumption or NOTHING, request.price, ended - request.started,
        )  # fmt: skip


def source_of(request: Request) -> tuple[str, str, str]:
    """Return the backend and the model that answered, and the reason for them; empty if none did."""
    won = request.won
    return ("", "", "") if won is None else (won.backend.name, won.model.name, won.reason)


def _audited(request: Request, ended: float) -> dict[str, Any]:
    """Return the fields of the audit log's line."""
    used, price = request.consumption or NOTHING, request.price
    backend, model, reason = source_of(request)
    key = request.authorization.partition(b" ")[2].strip()
    images = request.demand.images if request.demand is not None else ()
    return {
        "id": request.request_id,
        "tenant": request.tenant.name,
        "key": fingerprint(digest(key)) if key and request.tenant.name else "",
        "model_asked": request.asked,
        "model_used": model,
        "backend": backend,
        "route": reason,
        "status": request.outcome,
        "prompt_tokens": used.prompt_tokens,
        "visual_tokens": used.visual_tokens,
        "cached_tokens": used.cached_tokens,
        "completion_tokens": used.completion_tokens,
        "estimated": used.estimated,
        "images": used.images,
        "image_list": [(image.width, image.height, image.identity) for image in images],
        "cost": price.cost,
        "credit": price.credit,
        "cache": request.cached,
        "fallbacks": max(0, request.attempts - 1),
        "seconds": round(ended - request.started, 6),
    }


class Trace:
    """The stages of one request, each from the end of the one before.

    context: its place in a trace; None: it is not traced.
    decided: whether the gateway itself decided that it is not traced.
    forward_id: id of the span of the backend's work, which is the parent of the backend's own spans.
    trace_id: "": the request belongs to no trace.
    failures: (backend, reason, time) of attempts that failed.
    """

    __slots__ = ("_wall", "context", "decided", "failures", "forward_id", "marks", "started", "trace_id")

    def __init__(self, tracer: Tracer | None, headers: Mapping[bytes, bytes], started: float) -> None:
        parent = parent_of(headers)
        self.context: TraceContext | None = None if tracer is None else tracer.begin(headers, parent)
        self.decided = tracer is not None and parent is None and self.context is None
        self.forward_id = "" if self.context is None else new_span_id()
        self.trace_id = recorded_id(self.context, parent)
        self.started = started
        self._wall = time.time()
        self.marks: list[tuple[str, float]] = []
        self.failures: list[tuple[str, str, float]] = []

    def mark(self, stage: Stage, now: float) -> None:
        """Note that a stage has ended now."""
        self.marks.append((stage, now))

    def fail(self, now: float) -> None:
        """Note that the request has failed now, before a backend got it: the next stage had begun."""
        if len(self.marks) < STAGES.index("forward"):
            self.mark(STAGES[len(self.marks)], now)

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage."""
        seconds: dict[str, float] = {}
        for stage, start, end in self.intervals():
            seconds[stage] = seconds.get(stage, 0.0) + end - start
        return seconds

    def intervals(self) -> Iterator[tuple[str, float, float]]:
        """Yield (stage, start, end)."""
        at = self.started
        for stage, end in self.marks:
            yield stage, at, end
            at = end

    def wall(self, at: float) -> float:
        """Convert a time of the gateway's clock to seconds since 1970."""
        return self._wall + at - self.started

    def headers(self) -> dict[str, str]:
        """Return the headers that make the backend's spans children of this request's.

        If the gateway has decided to record nothing, the backend is told so, or it would decide again.
        """
        if self.decided:
            return {"traceparent": unrecorded()}
        return {} if self.context is None else {"traceparent": self.context.header(self.forward_id)}


def spans_of(
    trace: Trace,
    ended: float,
    name: str,
    root: Mapping[str, Attribute],
    forward: Mapping[str, Attribute],
    error: str,
) -> Iterable[Span]:
    """Yield the spans of a request: one of the request, one per stage.

    name, root: of the request's span. forward: attributes of the backend's work.
    error: code of the error that ended it; "": none.
    """
    context = trace.context
    assert context is not None  # only requests that are traced have spans
    yield Span(
        name, context.trace_id, context.span_id, context.parent_id,
        trace.wall(trace.started), trace.wall(ended), root, "server", error, context.state,
    )  # fmt: skip
    for stage, start, end in trace.intervals():
        is_forward = stage == "forward"
        yield Span(
            stage,
            context.trace_id,
            trace.forward_id if is_forward else new_span_id(),
            context.span_id,
            trace.wall(start),
            trace.wall(end),
            forward if is_forward else {},
            "client" if is_forward else "internal",
            error if is_forward else "",
            context.state,
            _failures(trace) if is_forward else (),
        )


def _failures(trace: Trace) -> tuple[SpanEvent, ...]:
    return tuple(
        SpanEvent("attempt_failed", trace.wall(at), {spans.BACKEND: backend, spans.ERROR_TYPE: reason})
        for backend, reason, at in trace.failures
    )


def _attributes(request: Request) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        spans.OPERATION: "text_completion" if request.api == "completions" else "chat",
        spans.PROVIDER_NAME: spans.PROVIDER,
        spans.HTTP_METHOD: "POST",
        spans.HTTP_ROUTE: request.path,
        spans.HTTP_STATUS: request.outcome,
        spans.REQUEST_ID: request.request_id,
        spans.REQUEST_MODEL: request.asked,
    }
    optional: dict[str, Attribute | None] = {
        spans.TENANT: request.tenant.name or None,
        spans.RESPONSE_MODEL: source_of(request)[1] or None,
        spans.ERROR_TYPE: request.code or None,
        spans.CACHE: request.cached or None,
        spans.FIRST_CHUNK: request.stream_began_s,
    }
    attributes |= {name: value for name, value in optional.items() if value is not None}
    used = request.consumption
    if used is not None:
        attributes |= {
            spans.INPUT_TOKENS: used.prompt_tokens,
            spans.OUTPUT_TOKENS: used.completion_tokens,
            spans.CACHED_TOKENS: used.cached_tokens,
        }
    if request.demand is not None and request.demand.images:
        images = request.demand.images
        attributes[spans.IMAGE_SIZES] = [f"{image.width}x{image.height}" for image in images]
        attributes[spans.VISUAL_TOKENS] = request.demand.visual_tokens
    return attributes


def _forward_attributes(request: Request) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {spans.ATTEMPTS: request.attempts}
    if request.won is not None:
        attributes |= {spans.BACKEND: request.won.backend.name, spans.ROUTE_REASON: request.won.reason}
    return attributes


def row_of(request: Request, ended: float) -> dict[str, Any]:
    """Return the row of a slow request. It holds no text, no bytes and no query strings."""
    trace, total = request.trace, ended - request.started
    stages, (backend, _, reason) = trace.stages(), source_of(request)
    images = request.demand.images if request.demand is not None else []
    return {
        "time": datetime.fromtimestamp(trace.wall(trace.started), UTC).isoformat(timespec="milliseconds"),
        "request_id": request.request_id,
        "trace_id": trace.trace_id,
        "route": request.path,
        "status": request.outcome,
        "model": request.asked,
        "caller": request.tenant.name or "-",
        "backend": backend,
        "route_reason": reason,
        "attempts": request.attempts,
        "seconds": round(total, 4),
        "ttft_seconds": None if request.stream_began_s is None else round(request.stream_began_s, 4),
        "stages": {name: round(seconds, 4) for name, seconds in stages.items()},
        "images": [{"width": image.width, "height": image.height} for image in images][:MOST_IMAGES],
        "visual_tokens": request.demand.visual_tokens if request.demand is not None else 0,
        "reasons": _reasons(stages, total, request),
    }


def _reasons(stages: Mapping[str, float], total: float, request: Request) -> list[str]:
    found = stage_reasons(stages, total, _CAUSES)
    if request.attempts > 1:
        found.append(f"{request.attempts} backends were asked")
    if request.code:
        found.append(f"it ended with {request.code}")
    return found
