"""The header that tells a backend about the trace of a request."""

from __future__ import annotations

from fovea.gateway.generate.records import Trace
from fovea.observe.spans import parent_of
from fovea.observe.tracer import Tracer, TraceSettings
from tests.observe.test_tracing import HEADER, TRACE, Sink


def told(share: float, headers: dict[bytes, bytes]) -> tuple[Trace, dict[str, str]]:
    tracer = Tracer(TraceSettings(trace_share=share), Sink())
    try:
        trace = Trace(tracer, headers, 0.0)
        return trace, trace.headers()
    finally:
        tracer.close()


def test_a_backend_continues_the_trace() -> None:
    trace, headers = told(1.0, {b"traceparent": HEADER})
    assert headers["traceparent"] == f"00-{TRACE}-{trace.forward_id}-01"


def test_what_the_gateway_does_not_record_its_backend_does_not_either() -> None:
    """The engine decided again, so its part of the trace was there alone."""
    trace, headers = told(0.0, {})
    parent = parent_of({b"traceparent": headers["traceparent"].encode()})
    assert parent is not None
    assert not parent.sampled
    assert trace.trace_id == ""


def test_without_traces_the_clients_header_is_left_alone() -> None:
    assert Trace(None, {b"traceparent": HEADER}, 0.0).headers() == {}
    assert told(1.0, {b"traceparent": HEADER[:-1] + b"0"})[1] == {}
