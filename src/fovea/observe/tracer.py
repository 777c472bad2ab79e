"""Collects traces and exports them from a thread, so that no request waits for the collector.

Requests hand over a function that makes their spans; the thread calls it. If the collector is slower than
the traffic, at most WAITING traces wait in memory. Further ones are dropped and counted. After a call that
failed, all traces are dropped for a while, those that wait included.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from fovea.core.errors import ConfigError
from fovea.core.names import install_command
from fovea.core.settings import check_settings, setting
from fovea.observe.spans import Parent, Span, TraceContext, context_of

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own variables for the URL of a collector."""
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""OpenTelemetry's own variables for the protocol."""
HTTP, GRPC = "http/protobuf", "grpc"


def check_endpoint(value: str) -> str:
    """Return "" if an endpoint is accepted, else what is accepted."""
    words = "the URL of a collector, such as http://collector:4318, or nothing"
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return words
    return "" if not value or (good and not parts.query and not parts.fragment) else words


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Traces for OpenTelemetry."""

    otlp_endpoint: str = setting(
        "",
        "URL of an OpenTelemetry collector, such as http://collector:4318; over HTTP, spans go to /v1/traces "
        "there. Empty: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT; without these, no "
        "traces. Needs the extra otel.",
        check=check_endpoint,
    )
    otlp_protocol: str = setting(
        "",
        "How spans are sent: OTLP over HTTP, or over gRPC (usually port 4317; http:// is without TLS). "
        "Empty: OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or OTEL_EXPORTER_OTLP_PROTOCOL; without these, over HTTP.",
        choices=("", HTTP, GRPC),
    )
    trace_share: float = setting(
        1.0,
        "Share of the requests that are traced if the client does not decide. A client decides with the "
        "header traceparent.",
        low=0,
        high=1,
    )
    trace_content: bool = setting(
        False,
        "Traces hold the texts of prompts and answers, up to 8,192 characters each. They never hold images.",
    )
    trace_legacy_names: bool = setting(
        False, "Spans also have the attributes of vLLM's traces, such as gen_ai.latency.time_in_queue."
    )

    def __post_init__(self) -> None:
        check_settings(self)


log = logging.getLogger("fovea.trace")
WAITING = 2048
"""Most traces that wait for the thread."""
BATCH = 64
"""Most traces in one call to the collector."""
PAUSE_S = 1.0
"""Longest time for which a trace waits for others to share a call."""
FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0
"""Seconds without a call after the first failed one, and at most; they double with every failure."""
CLOSE_S = 3.0
"""Seconds in which the last traces are exported when the server stops."""
MakeSpans = Callable[[], Iterable[Span]]


class Exporter(Protocol):
    """Sends spans to a collector."""

    def export(self, spans: Sequence[Span]) -> bool:
        """Send spans; return whether the collector took them. May take seconds. Raises nothing."""
        ...

    def close(self) -> None:
        """Give up what is being sent."""
        ...


class Tracer:
    """The traces of one process.

    settings: which requests are traced.
    exported, dropped: spans that the collector took; traces and spans that it did not get.
    """

    def __init__(self, settings: TraceSettings, exporter: Exporter) -> None:
        self.settings = settings
        self.exported = 0
        self.dropped = 0
        self._exporter = exporter
        self._traces: queue.Queue[MakeSpans | None] = queue.Queue(WAITING)
        self._working = True
        self._rest_s = 0.0
        self._rests_until = 0.0
        self._thread = threading.Thread(target=self._run, name="fovea-traces", daemon=True)
        self._thread.start()

    def begin(self, headers: Mapping[bytes, bytes], parent: Parent | None) -> TraceContext | None:
        """Return the place of a request in a trace; None: it is not traced."""
        return context_of(headers, parent, self.settings.trace_share)

    def finish(self, make: MakeSpans) -> None:
        """Hand over the spans of a request that has ended. It takes microseconds and never blocks."""
        if self._resting:
            self.dropped += 1
            return
        try:
            self._traces.put_nowait(make)
        except queue.Full:
            self.dropped += 1

    def stats(self) -> dict[str, float]:
        """Figures for the metrics."""
        return {
            "trace_spans_exported": self.exported,
            "trace_spans_dropped": self.dropped,
            "traces_waiting": self._traces.qsize(),
        }

    def close(self) -> None:
        """Export what waits, for at most CLOSE_S seconds."""
        self._working = False
        with contextlib.suppress(queue.Full):
            self._traces.put_nowait(None)
        self._thread.join(CLOSE_S)
        self._exporter.close()

    def _run(self) -> None:
        while True:
            batch, last = self._next()
            if self._resting:
                self.dropped += len(batch)
            elif spans := self._spans(batch):
                self._note(len(spans), taken=self._exporter.export(spans))
            if last:
                return

    @property
    def _resting(self) -> bool:
        """Whether the collector is left alone, because the last call to it failed a short time ago."""
        return time.monotonic() < self._rests_until

    def _note(self, spans: int, *, taken: bool) -> None:
        """Count exported or dropped spans, and decide when the collector is called again."""
        if taken:
            self.exported += spans
            if self._rest_s:
                log.info("the collector of traces takes spans again")
            self._rest_s = 0.0
            return
        if not self._rest_s:
            log.warning("the collector of traces takes no spans; they are dropped and counted")
        self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s or FIRST_REST_S)
        self._rests_until = time.monotonic() + self._rest_s
        self.dropped += spans  # last: who sees the count also sees that the tracer rests

    def _next(self) -> tuple[list[MakeSpans], bool]:
        """Wait for traces. Returns them, and whether they are the last ones."""
        batch: list[MakeSpans] = []
        ends = time.monotonic() + PAUSE_S
        while len(batch) < BATCH:
            try:
                make = self._traces.get(
                    timeout=max(0.001, ends - time.monotonic()) if self._working else 0.001
                )
            except queue.Empty:
                return batch, not self._working
            if make is None:
                return batch, True
            batch.append(make)
        return batch, False

    def _spans(self, batch: Iterable[MakeSpans]) -> list[Span]:
        spans: list[Span] = []
        for make in batch:
            try:
                spans += make()
            except Exception as error:  # a defect here must not end all traces
                self.dropped += 1
                log.error("a trace could not be made", exc_info=error)
        return spans


def open_tracer(settings: TraceSettings, service: str, version: str) -> Tracer | None:
    """Return the tracer of a process; None: no collector is named.

    service: name of the service, unless OTEL_SERVICE_NAME gives another one.
    Raises ConfigError if the extra otel is not installed.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if not settings.otlp_endpoint and not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    protocol = chosen_protocol(settings, os.environ)
    try:
        from fovea.observe.otlp import OtlpExporter

        exporter = OtlpExporter(settings.otlp_endpoint, service, version, grpc=protocol == GRPC)
    except ImportError as error:
        raise ConfigError(
            f"traces need OpenTelemetry's packages; install the extra otel: {install_command('otel')}",
            param="otlp_endpoint",
        ) from error
    return Tracer(settings, exporter)


def chosen_protocol(settings: TraceSettings, environment: Mapping[str, str]) -> str:
    """Return how spans are sent: by the setting, else by OpenTelemetry's variables, else over HTTP.

    Raises ConfigError if a variable names a protocol that Fovea does not speak.
    """
    if settings.otlp_protocol:
        return settings.otlp_protocol
    for name in PROTOCOLS:
        if value := environment.get(name, ""):
            if value not in (HTTP, GRPC):
                raise ConfigError(f"{name} is {value!r}; accepted: {HTTP}, {GRPC}", param="otlp_protocol")
            return value
    return HTTP
