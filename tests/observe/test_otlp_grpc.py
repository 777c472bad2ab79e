"""Spans over gRPC: a real receiver gets them, and one that is gone costs no more than the time limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from fovea.core.errors import ConfigError
from fovea.observe.otlp import OtlpExporter
from fovea.observe.spans import Span
from fovea.observe.tracer import TraceSettings, chosen_protocol, open_tracer
from tests.support.servers import free_port

SPAN = Span("chat", "1" * 32, "2" * 16, "", 1.0, 2.0)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the requests that arrive."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self.arrived = threading.Event()

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: object) -> object:
        self.requests.append(request)
        self.arrived.set()
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def receiver() -> Iterator[tuple[Receiver, str]]:
    found = Receiver()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield found, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_receiver_gets_spans_with_their_names_and_times(receiver: tuple[Receiver, str]) -> None:
    found, url = receiver
    exporter = OtlpExporter(url, "fovea", "1", grpc=True)
    assert exporter.export([SPAN])
    exporter.close()
    (resource,) = found.requests[0].resource_spans
    assert ("service.name", "fovea") in {
        (each.key, each.value.string_value) for each in resource.resource.attributes
    }
    (span,) = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.start_time_unix_nano) == ("chat", "1" * 32, 1_000_000_000)


def test_a_tracer_sends_over_the_protocol_of_the_setting(receiver: tuple[Receiver, str]) -> None:
    found, url = receiver
    tracer = open_tracer(TraceSettings(otlp_endpoint=url, otlp_protocol="grpc"), "fovea", "1")
    assert tracer is not None
    tracer.finish(lambda: [SPAN])
    assert found.arrived.wait(20)
    tracer.close()


def test_a_receiver_that_is_gone_takes_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.observe.otlp.TIMEOUT_S", 0.2)
    exporter = OtlpExporter(f"http://127.0.0.1:{free_port()}", "fovea", "1", grpc=True)
    assert not exporter.export([SPAN])
    exporter.close()


def test_the_protocol_is_that_of_the_setting_or_of_the_variables() -> None:
    both = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    assert chosen_protocol(TraceSettings(), {}) == "http/protobuf"
    assert chosen_protocol(TraceSettings(), both) == "http/protobuf"
    assert chosen_protocol(TraceSettings(otlp_protocol="grpc"), both) == "grpc"
    assert chosen_protocol(TraceSettings(), {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) == "grpc"
    with pytest.raises(
        ConfigError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; accepted: http/protobuf, grpc"
    ):
        chosen_protocol(TraceSettings(), {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
