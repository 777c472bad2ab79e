"""Sends spans over OTLP/HTTP with OpenTelemetry's own exporter, which also reads the variables OTEL_*."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fovea.core.errors import ConfigError
from fovea.core.names import install_command
from fovea.observe.spans import SCHEMA_URL, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PATH = "/v1/traces"
TIMEOUT_S = 5.0
"""Seconds in which a batch has to reach the collector, its retries included."""
NANOSECONDS = 1_000_000_000


def is_wanted(endpoint: str) -> bool:
    """Tell whether a collector is named, by the setting or by OpenTelemetry's own variables."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return bool(endpoint or any(os.environ.get(name) for name in ENDPOINTS))


class OtlpExporter:
    """An exporter of spans.

    endpoint: URL of the collector; "": from the environment.
    Raises ConfigError if OpenTelemetry's packages are not installed.
    """

    def __init__(self, endpoint: str, service: str, version: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http import Compression
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource

            from fovea.observe.otlp_answers import session
        except ImportError as error:
            raise ConfigError(
                f"traces need OpenTelemetry's packages; install the extra otel: {install_command('otel')}",
                param="otlp_endpoint",
            ) from error
        # Fovea says once that a collector is gone; the exporter would say it with every batch.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        given: dict[str, Any] = {"endpoint": _url(endpoint)} if endpoint else {}
        if not any("COMPRESSION" in name for name in os.environ if name.startswith("OTEL_EXPORTER_OTLP_")):
            given["compression"] = Compression.Gzip
        if not any(name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ):
            given["session"] = session()  # otherwise the provider brings a session of its own
        self._exporter = OTLPSpanExporter(timeout=TIMEOUT_S, **given)
        resource = {"service.version": version}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            resource["service.name"] = service
        self._resource = Resource.create(resource)
        self._scope = _scope(version)

    def export(self, spans: Sequence[Span]) -> bool:
        """Send spans; return whether the collector took them."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            sent = self._exporter.export([self._readable(span) for span in spans])
        except Exception:  # noqa: BLE001 - whatever the network does, serving goes on
            return False
        return sent is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Give up what is being sent."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _readable(self, span: Span) -> ReadableSpan:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

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


def _scope(version: str) -> Any:
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    return InstrumentationScope("fovea", version, SCHEMA_URL)


def _context(trace_id: str, span_id: str, state: str, *, is_remote: bool) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    known = TraceState.from_header([state]) if state else None
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, sampled, known)


def _url(endpoint: str) -> str:
    trimmed = endpoint.rstrip("/")
    return trimmed if trimmed.endswith(PATH) else trimmed + PATH
