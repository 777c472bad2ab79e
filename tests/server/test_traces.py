"""Traces of a real server and a real gateway, received by a real OTLP server."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fovea import Engine
from fovea.observe import spans as names
from fovea.server.settings import ServerSettings
from tests.server.support import Json, Server, chat, data_url, image, picture, running, user
from tests.support.collector import Collector, SeenSpan, collecting
from tests.support.servers import fovea_gateway
from tests.support.thorough import is_thorough

CALLER = "00f067aa0ba902b7"
SECRET = "the secret of the prompt"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(engine: Engine, collector: Collector, files: Path) -> Iterator[Server]:
    settings = ServerSettings.of(otlp_endpoint=collector.url, slow_request_s=1e-4)
    with running(engine, settings, files) as server:
        yield server


def question(text: str = "What is it?", **fields: Any) -> Json:
    body = chat(user(image(data_url(picture(224, 160))), text), max_tokens=24, ignore_eos=True)
    return {**body, **fields}


def header(number: int) -> dict[str, str]:
    return {"traceparent": f"00-{number:032x}-{CALLER}-01"}


def trace(collector: Collector, number: int, roots: int = 1) -> list[SeenSpan]:
    """Wait for a trace with so many servers in it."""

    def own(spans: list[SeenSpan]) -> list[SeenSpan]:
        return [span for span in spans if span.trace_id == f"{number:032x}"]

    return own(collector.wait(lambda spans: sum(s.kind == "server" for s in own(spans)) >= roots))


def children(spans: list[SeenSpan], parent: SeenSpan) -> list[SeenSpan]:
    return [span for span in spans if span.parent_id == parent.span_id]


def test_one_trace_from_the_client_through_gateway_and_engine(traced: Server, collector: Collector) -> None:
    with fovea_gateway([traced.url], "--otlp-endpoint", collector.url) as gateway:
        shares = []
        for number in range(1, 6 if is_thorough() else 4):
            body = question(f"What is it, number {number}?", stream=True)
            answer = httpx.post(
                f"{gateway}/v1/chat/completions", json=body, headers=header(number), timeout=60
            )
            assert answer.status_code == 200, answer.text
            spans = trace(collector, number, roots=2)
            outer, inner = sorted(
                (s for s in spans if s.kind == "server"), key=lambda s: s.service, reverse=True
            )[::-1]
            assert (outer.service, inner.service) == ("fovea-gateway", "fovea-server")
            assert outer.parent_id == CALLER
            forward = next(span for span in children(spans, outer) if span.kind == "client")
            assert forward.name == "forward"
            assert inner.parent_id == forward.span_id
            assert forward.attributes[names.ROUTE_REASON]
            for root in (outer, inner):
                shares.append(sum(span.seconds for span in children(spans, root)) / root.seconds)
            stages = {span.name for span in children(spans, inner)}
            assert {"receive", "preprocess", "queue", "prefill", "decode", "detokenize", "respond"} <= stages
            assert {"receive", "inspect", "limits", "queue"} <= {s.name for s in children(spans, outer)}
            assert inner.attributes[names.OUTPUT_TOKENS] == outer.attributes[names.OUTPUT_TOKENS] == 24
            assert inner.attributes[names.IMAGE_SIZES] == ["224x160"]
    assert max(shares) <= 1.05
    # The median, because another process may stop one of these at any moment on a shared machine.
    assert sorted(shares)[len(shares) // 2] >= 0.95


def test_without_a_caller_a_trace_begins_here(traced: Server, collector: Collector) -> None:
    answer = traced.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "ignore_eos": True})
    request_id = answer.headers["x-request-id"]

    def roots(spans: list[SeenSpan]) -> list[SeenSpan]:
        return [span for span in spans if span.attributes.get(names.REQUEST_ID) == request_id]

    spans = collector.wait(lambda spans: bool(roots(spans)))
    (root,) = roots(spans)
    assert root.parent_id == ""
    runs = [
        span for span in spans if span.parent_id == root.span_id and "gen_ai.response.id" in span.attributes
    ]
    assert [span.name for span in runs] == [f"text_completion {root.attributes[names.REQUEST_MODEL]}"] * 2


def test_a_refused_request_is_traced(traced: Server, collector: Collector) -> None:
    answer = httpx.post(f"{traced.url}/v1/chat/completions", json={"messages": []}, headers=header(77))
    assert answer.status_code == 400
    (root,) = trace(collector, 77)[:1]
    assert root.attributes[names.HTTP_STATUS] == 400
    assert not root.error


def test_texts_are_in_no_trace_unless_asked(
    engine: Engine, traced: Server, collector: Collector, files: Path
) -> None:
    httpx.post(f"{traced.url}/v1/chat/completions", json=question(SECRET), headers=header(88), timeout=60)
    assert SECRET not in repr(trace(collector, 88))
    settings = ServerSettings.of(otlp_endpoint=collector.url, trace_content=True, trace_legacy_names=True)
    with running(engine, settings, files) as server:
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json=question(SECRET), headers=header(89), timeout=60
        )
    (root,) = (span for span in trace(collector, 89) if span.kind == "server")
    given = json.loads(root.attributes[names.INPUT_MESSAGES])
    assert given == [{"role": "user", "parts": [{"type": "text", "content": SECRET}]}]
    made = json.loads(root.attributes[names.OUTPUT_MESSAGES])[0]["parts"][0]["content"]
    assert made == answer.json()["choices"][0]["message"]["content"]
    assert root.attributes["gen_ai.latency.time_to_first_token"] > 0
    assert "base64" not in repr(trace(collector, 89))


def test_slow_requests_are_kept_without_their_texts(traced: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fovea.slow"):
        answer = httpx.post(
            f"{traced.url}/v1/chat/completions?token=hidden",
            json=question(SECRET),
            headers=header(99),
            timeout=60,
        )
    assert answer.status_code == 200
    row = traced.app.state.tracking.slow.rows()[0]
    assert row["trace_id"] == f"{99:032x}"
    assert row["images"][0]["width"] == 224
    assert row["images"][0]["tokens"] > 0
    assert row["reasons"]
    for hidden in (SECRET, "hidden", "base64"):
        assert hidden not in json.dumps(row)
        assert hidden not in caplog.text


def test_a_dead_collector_delays_no_answer(engine: Engine, files: Path) -> None:
    with running(engine, ServerSettings.of(otlp_endpoint="http://127.0.0.1:9"), files) as server:
        for _ in range(3):
            assert server.post("/v1/chat/completions", chat()).status_code == 200
        assert server.app.state.tracking.stats()["trace_spans_exported"] == 0
