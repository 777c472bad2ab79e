"""Records of a request that has ended: metrics, usage, its trace, slow requests, and the audit log.

A line of the audit log says who used what, and never what was in it. It holds numbers, names that the
operator chose, and digests. It holds no text, address, query string or byte of a request or answer, and no
key. Two fields come from the client: the name of the model and the request id. They are written only if they
look like names; otherwise a mark stands there. Images are named by the first 16 hex digits of the digest of
their bytes, so that the same image can be found again in the log, but not be seen.
"""

from __future__ import annotations

import datetime as dt
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from fovea.access.keys import digest, fingerprint
from fovea.access.log import AccessLog
from fovea.gateway.exchange import Exchange
from fovea.gateway.metrics import Metrics
from fovea.gateway.usage.log import UsageLog
from fovea.gateway.usage.prices import Consumption, Price
from fovea.gateway.usage.store import ServedFrom, UsageRecord
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


MOST_LISTED_IMAGES = 64
"""Most images of a request that a line describes. It always has their number."""
IDENTITY_DIGITS = 16
NO_NAME = "(not a name)"
"""Stands for a text of the client that does not look like a name."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
_FINGERPRINT = re.compile(r"[0-9a-f]{8}")
_DIGEST = re.compile(r"[0-9a-f]{16,}")


class AuditedImage(NamedTuple):
    """An image of a request.

    width, height: pixels as the client sent it; 0: unknown.
    identity: hex digits of the digest of its bytes, at least 16; empty: unknown.
    """

    width: int
    height: int
    identity: str


class AuditRecord(NamedTuple):
    """One request, when it has ended.

    at_s: time of its end, seconds of the epoch.
    request_id: as in the answer's header.
    tenant: name of the client. fingerprint: the first 8 hex digits of its key's hash; empty: no key.
    asked, used: the model in the request, and the one that answered.
    backend: name of the backend that answered; empty: none.
    route: the reason why it was chosen, such as "image, next". The gateway has made this text.
    status: HTTP status of the answer.
    images: the request's images, in order.
    cache: result of the response cache, as "hit" or "miss"; empty: it was not asked.
    fallbacks: backends that failed before the one that answered.
    seconds: from arrival to end.
    """

    at_s: float
    request_id: str
    tenant: str
    fingerprint: str
    asked: str
    used: str
    backend: str
    route: str
    status: int
    consumption: Consumption
    price: Price
    images: Sequence[AuditedImage]
    cache: str
    fallbacks: int
    seconds: float


class AuditLog:
    """Writes the lines with a thread, so that a slow disk delays no request (`access.log.AccessLog`).

    If the disk is slower than the requests, lines are left out, and a later line says how many.

    target: path of the file; "true": the logger `fovea.access`; "false": nowhere.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, target: str) -> None:
        self._log = AccessLog(target)

    @property
    def on(self) -> bool:
        return self._log.on

    def write(self, record: AuditRecord) -> None:
        """Write the line of a request."""
        if self._log.on:
            self._log.write(line_of(record))

    def close(self) -> None:
        """Write the waiting lines and close the file."""
        self._log.close()


def line_of(record: AuditRecord) -> dict[str, Any]:
    """Return the fields of a line, in the order in which they are written."""
    used, price = record.consumption, record.price
    at = dt.datetime.fromtimestamp(record.at_s, dt.UTC)
    return {
        "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "id": name_of(record.request_id),
        "tenant": name_of(record.tenant),
        "key": record.fingerprint if _FINGERPRINT.fullmatch(record.fingerprint) else "-",
        "model_asked": name_of(record.asked),
        "model_used": name_of(record.used),
        "backend": name_of(record.backend),
        "route": record.route,
        "status": record.status,
        "prompt_tokens": used.prompt_tokens,
        "visual_tokens": used.visual_tokens,
        "cached_tokens": used.cached_tokens,
        "completion_tokens": used.completion_tokens,
        "estimated": used.estimated,
        "images": used.images,
        "image_list": [_image(image) for image in record.images[:MOST_LISTED_IMAGES]],
        "cost": price.cost,
        "credit": price.credit,
        "cache": name_of(record.cache),
        "fallbacks": record.fallbacks,
        "seconds": round(record.seconds, 6),
    }


def name_of(text: str) -> str:
    """Return a text if it looks like a name, and otherwise a mark. An empty text stays empty.

    A name has at most 128 letters, digits and ._:/@+- and is no address.
    """
    return text if not text or (_NAME.fullmatch(text) and "://" not in text) else NO_NAME


def _image(image: AuditedImage) -> list[Any]:
    identity = image.identity[:IDENTITY_DIGITS] if _DIGEST.fullmatch(image.identity) else ""
    return [image.width, image.height, identity]


MILLION = 1_000_000
NOTHING = Consumption()
FREE = Price(0)


class Book:
    """The records of one worker.

    usage: None: no usage is recorded.
    """

    def __init__(
        self,
        metrics: Metrics,
        usage: UsageLog | None,
        audit: AuditLog,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._usage = usage
        self._audit = audit
        self._now = now

    def close(self) -> None:
        """Write what is left."""
        if self._usage is not None:
            self._usage.close()
        self._audit.close()

    def enter(self, request: Request) -> None:
        """Record a request that has ended."""
        metrics, bill = self._metrics, request.bill
        used, price = (NOTHING, FREE) if bill is None else (bill.consumption, bill.price)
        seconds = request.services.clock() - request.started
        model = metrics.models(request.model.name if request.model is not None else "unknown")
        tenant = metrics.tenants(request.tenant.name)
        metrics.count("requests", request.api, model, tenant, str(request.status))
        context = request.trace.context
        trace_id = "" if context is None else context.trace_id
        metrics.observe("request_seconds", seconds, model, trace_id=trace_id)
        if request.waited_s:
            metrics.observe("waiting_seconds", request.waited_s, model)
        if request.stored.result:
            metrics.count("cache", request.stored.result)
        if request.won is not None:
            metrics.count("attempts", request.won.backend.name, "answered")
            metrics.count("routes", request.won.reason)
            backend = request.won.backend.name
            metrics.observe("first_byte_seconds", request.won.first_byte_s, backend, trace_id=trace_id)
        for kind, count in (
            ("prompt", used.prompt_tokens),
            ("visual", used.visual_tokens),
            ("cached", used.cached_tokens),
            ("completion", used.completion_tokens),
        ):
            if count:
                metrics.count("tokens", tenant, kind, by=count)
        if price.cost:
            metrics.count("cost", tenant, by=price.cost / MILLION)
        if self._usage is not None and request.model is not None:
            self._usage.add(self._record(request, used, price, seconds))
        if self._audit.on:
            self._audit.write(self._line(request, used, price, seconds))

    def _record(self, request: Request, used: Consumption, price: Price, seconds: float) -> UsageRecord:
        assert request.model is not None
        served: ServedFrom = "backend"
        if request.stored.result in ("hit", "stale"):
            served = "response_cache"
        elif request.won is not None and request.won.reason.startswith(("retry", "fallback")):
            served = "fallback"
        return UsageRecord(
            self._now(),
            request.tenant.name,
            request.model.name if request.won is None else request.won.model.name,
            "" if request.won is None else request.won.backend.name,
            served,
            (request.status >= 400 and not request.gone) or request.code in ("stream_broken", "own_error"),
            used,
            price,
            seconds,
        )

    def _line(self, request: Request, used: Consumption, price: Price, seconds: float) -> AuditRecord:
        demand, won = request.demand, request.won
        key = request.exchange.authorization.partition(b" ")[2].strip()
        return AuditRecord(
            self._now(),
            request.exchange.request_id,
            request.tenant.name,
            fingerprint(digest(key)) if key and request.tenant.name else "",
            request.asked,
            won.model.name if won is not None else "",
            won.backend.name if won is not None else "",
            won.reason if won is not None else "",
            request.status,
            used,
            price,
            [
                AuditedImage(image.width, image.height, image.identity)
                for image in (demand.images if demand is not None else ())
            ],
            request.stored.result,
            max(0, request.attempts - 1),
            seconds,
        )


STAGES = ("receive", "inspect", "cache", "limits", "queue", "forward")
"""Stages of a request in a gateway, in order. The answer from the response cache ends after `cache`."""
RECEIVE, INSPECT, CACHE, LIMITS, QUEUE, FORWARD = STAGES
_CAUSES = {
    RECEIVE: "the request arrived slowly",
    INSPECT: "its images were slow to read, or came from slow hosts",
    CACHE: "the response cache was slow, or it waited for an equal request",
    LIMITS: "the accounts of tenants were slow",
    QUEUE: "it waited for a backend with room",
    FORWARD: "its backend took the time; the trace and the backend's own log tell more",
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

    def mark(self, stage: str, now: float) -> None:
        """Note that a stage has ended now."""
        self.marks.append((stage, now))

    def fail(self, now: float) -> None:
        """Note that the request has failed now, before a backend got it: the next stage had begun."""
        if len(self.marks) < STAGES.index(FORWARD):
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


class Tracking:
    """Traces and the log of slow requests of one worker."""

    def __init__(self, slow: SlowRequests, tracer: Tracer | None) -> None:
        self.slow = slow
        self.tracer = tracer

    def begin(self, exchange: Exchange, started: float) -> Trace:
        """Begin to follow a request."""
        return Trace(self.tracer, exchange.headers, started)

    def finish(self, request: Request, ended: float) -> None:
        """Record a request that has ended."""
        trace, total = request.trace, ended - request.started
        if self.slow.is_slow(total, request.first_byte_s):
            self.slow.add(row_of(request, ended))
        if self.tracer is not None and trace.context is not None:
            root, forward = _attributes(request), _forward_attributes(request)
            name = f"{root[spans.OPERATION]} {request.asked}".strip()
            code = request.code
            self.tracer.finish(lambda: spans_of(trace, ended, name, root, forward, code))

    def stats(self) -> dict[str, float]:
        """Figures for the metrics."""
        return {} if self.tracer is None else self.tracer.stats()

    def close(self) -> None:
        """Export the last traces. May take seconds."""
        if self.tracer is not None:
            self.tracer.close()


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
        is_forward = stage == FORWARD
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
        spans.HTTP_ROUTE: request.exchange.path,
        spans.HTTP_STATUS: request.status,
        spans.REQUEST_ID: request.exchange.request_id,
        spans.REQUEST_MODEL: request.asked,
    }
    optional: dict[str, Attribute | None] = {
        spans.TENANT: request.tenant.name or None,
        spans.RESPONSE_MODEL: None if request.won is None else request.won.model.name,
        spans.ERROR_TYPE: request.code or None,
        spans.CACHE: request.stored.result or None,
        spans.FIRST_CHUNK: request.first_byte_s,
    }
    attributes |= {name: value for name, value in optional.items() if value is not None}
    if request.bill is not None:
        used = request.bill.consumption
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
    trace, won, total = request.trace, request.won, ended - request.started
    stages = trace.stages()
    images = request.demand.images if request.demand is not None else []
    return {
        "time": datetime.fromtimestamp(trace.wall(trace.started), UTC).isoformat(timespec="milliseconds"),
        "request_id": request.exchange.request_id,
        "trace_id": trace.trace_id,
        "route": request.exchange.path,
        "status": request.status,
        "model": request.asked,
        "caller": request.tenant.name or "-",
        "backend": won.backend.name if won is not None else "",
        "route_reason": won.reason if won is not None else "",
        "attempts": request.attempts,
        "seconds": round(total, 4),
        "ttft_seconds": None if request.first_byte_s is None else round(request.first_byte_s, 4),
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
