"""A collector of traces for tests: a real HTTP server that takes OTLP, with the protocol's own messages."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True)
class SeenSpan:
    """A span as it arrived. start, end: nanoseconds since 1970."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    kind: str
    attributes: dict[str, Any]
    error: str
    events: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


@dataclass
class Collector:
    """The spans that have arrived."""

    url: str
    spans: list[SeenSpan] = field(default_factory=list)
    status: int = 200

    def wait(self, enough: Callable[[list[SeenSpan]], bool], seconds: float = 20.0) -> list[SeenSpan]:
        """Wait until the spans are enough, and return them."""
        ends = time.monotonic() + seconds
        while not enough(self.spans):
            assert time.monotonic() < ends, [span.name for span in self.spans]
            time.sleep(0.02)
        return list(self.spans)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            good = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            if good and collector.status == 200:
                collector.spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.status if good else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _spans(message: ExportTraceServiceRequest) -> Iterator[SeenSpan]:
    for resource in message.resource_spans:
        of_resource = {pair.key: _value(pair.value) for pair in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield SeenSpan(
                    of_resource.get("service.name", ""),
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    KINDS[span.kind],
                    {pair.key: _value(pair.value) for pair in span.attributes},
                    span.status.message,
                    tuple(event.name for event in span.events),
                )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
