"""Sends spans over OTLP with OpenTelemetry's own exporters, which also read the variables OTEL_*.

Only this module knows the library; it is imported if traces are exported. Over HTTP, little of a collector's
answer is read: the exporter would read one of gigabytes into memory, and one that never ends for ever. Over
gRPC the library itself limits answers to 4 MiB.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from requests.adapters import HTTPAdapter

from fovea.observe.spans import SCHEMA_URL, Span

PATH = "/v1/traces"
TIMEOUT_S = 5.0
"""Seconds in which a batch has to reach the collector, its retries included."""
NANOSECONDS = 1_000_000_000
MOST_BYTES = 64 * 1024
"""Bytes of an answer that are read."""
MOST_S = 5.0
"""Seconds for which an answer is read after its head."""


class OtlpExporter:
    """An exporter of spans.

    endpoint: URL of the collector; "": from the environment.
    grpc: send over gRPC instead of HTTP. Raises ImportError if its exporter is not installed.
    """

    def __init__(self, endpoint: str, service: str, version: str, *, grpc: bool = False) -> None:
        # Fovea says once that a collector is gone; the exporter would say it with every batch.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = _over_grpc(endpoint) if grpc else _over_http(endpoint)
        resource = {"service.version": version}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            resource["service.name"] = service
        self._resource = Resource.create(resource)
        self._scope = InstrumentationScope("fovea", version, SCHEMA_URL)

    def export(self, spans: Sequence[Span]) -> bool:
        """Send spans; return whether the collector took them."""
        try:
            sent = self._exporter.export([self._readable(span) for span in spans])
        except Exception:  # noqa: BLE001 - whatever the network does, serving goes on
            return False
        return sent is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Give up what is being sent."""
        self._exporter.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=_context(span.trace_id, span.span_id, span.state, is_remote=False),
            parent=_context(span.trace_id, span.parent_id, "", is_remote=True) if span.parent_id else None,
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[
                Event(event.name, dict(event.attributes), round(event.at * NANOSECONDS))
                for event in span.events
            ],
            kind=SpanKind[span.kind.upper()],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=round(span.start * NANOSECONDS),
            end_time=round(max(span.start, span.end) * NANOSECONDS),
            instrumentation_scope=self._scope,
        )


def _compression_is_set() -> bool:
    return any("COMPRESSION" in name for name in os.environ if name.startswith("OTEL_EXPORTER_OTLP_"))


def _over_http(endpoint: str) -> Any:
    given: dict[str, Any] = {"endpoint": _url(endpoint)} if endpoint else {}
    if not _compression_is_set():
        given["compression"] = Compression.Gzip
    if not any(name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ):
        given["session"] = session()  # otherwise the provider brings a session of its own
    return OTLPSpanExporter(timeout=TIMEOUT_S, **given)


def _over_grpc(endpoint: str) -> Any:
    import grpc
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    given: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if not _compression_is_set():
        given["compression"] = grpc.Compression.Gzip
    return OTLPSpanExporter(timeout=TIMEOUT_S, **given)


def _context(trace_id: str, span_id: str, state: str, *, is_remote: bool) -> SpanContext:
    known = TraceState.from_header([state]) if state else None
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, sampled, known)


def _url(endpoint: str) -> str:
    trimmed = endpoint.rstrip("/")
    return trimmed if trimmed.endswith(PATH) else trimmed + PATH


class BriefAnswers(HTTPAdapter):
    """Cuts answers after MOST_BYTES and MOST_S. Refuses redirects, which no collector needs."""

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        """Send a request. Raises requests.RequestException."""
        response = super().send(request, *args, **options)
        if 300 <= response.status_code < 400:
            response.close()
            raise requests.TooManyRedirects("the collector answered with a redirect")
        response.raw = io.BytesIO(_beginning(response.raw))
        return response


def session() -> requests.Session:
    """Return a session whose answers are cut."""
    made = requests.Session()
    for scheme in ("http://", "https://"):
        made.mount(scheme, BriefAnswers())
    return made


def _beginning(raw: Any) -> bytes:
    """Return the first bytes of an answer. The connection stays usable only if the answer ends with them."""
    ends = time.monotonic() + MOST_S
    read = b""
    while len(read) < MOST_BYTES and time.monotonic() < ends:
        piece = raw.read1(MOST_BYTES - len(read), decode_content=False)
        if not piece:
            return read
        read += piece
    raw.close()
    return read
