"""The formats of a scrape: plain text, and OpenMetrics with exemplars, as a real Prometheus reads them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from fovea.core.types import Delta, StageTimings, Usage
from fovea.gateway.metrics import Metrics as GatewayMetrics
from fovea.observe.exposition import OPENMETRICS, PLAIN, prefers_openmetrics
from fovea.observe.metrics import Metrics
from tests.support.servers import prometheus_server

TRACE, OTHER = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


def traced() -> Metrics:
    """The metrics of a server that has answered a traced request and one without a trace."""
    metrics = Metrics(lambda: {"kv_blocks_total": 8, "kv_block_tokens": 16}, "model", "1.2")
    for seconds, trace_id in ((0.2, TRACE), (3.0, "")):
        metrics.observe_first_token(seconds, trace_id)
        metrics.observe_gap(0.01)
        timings = StageTimings(prefill=0.2, decode=0.4, ttft=0.2)
        metrics.observe_delta(
            Delta(0, "", finish_reason="stop", usage=Usage(5, 3), timings=timings), trace_id=trace_id
        )
        metrics.observe_request("/v1/chat/completions", 200, seconds + 0.4, trace_id)
    return metrics


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        (PROMETHEUS, True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text", True),
        ("text/plain;version=0.0.4;q=0.9, application/openmetrics-text;q=0.3", False),
        ("application/openmetrics-text;version=2.0.0, text/plain", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x", False),
        (";;=,,;q", False),
    ],
)
def test_the_accept_header_chooses_the_format(accept: str, chosen: bool) -> None:
    assert prefers_openmetrics(accept) is chosen
    assert traced().exposition(accept).media_type == (OPENMETRICS if chosen else PLAIN)


def test_both_formats_hold_the_same_series() -> None:
    metrics = traced()
    text = metrics.exposition(PROMETHEUS).body.decode()
    assert text.endswith("# EOF\n")
    open_names = {sample.name for family in open_families(text) for sample in family.samples}
    plain = plain_families(metrics.exposition().body.decode())
    assert open_names == {sample.name for family in plain for sample in family.samples}
    assert {
        "fovea:ttft_seconds_bucket",
        "vllm:prompt_tokens_total",
        "vllm_request_success_total",
    } <= open_names


def test_buckets_name_the_trace_of_a_request() -> None:
    families = open_families(traced().exposition(PROMETHEUS).body.decode())
    samples = [sample for family in families for sample in family.samples if sample.exemplar]
    assert {sample.exemplar.labels["trace_id"] for sample in samples} == {TRACE}
    names = {"fovea:ttft_seconds_bucket", "fovea:request_seconds_bucket", "fovea:stage_seconds_bucket"}
    assert {sample.name for sample in samples} == names
    assert [s.exemplar.value for s in samples if s.name == "fovea:ttft_seconds_bucket"] == [0.2]


def test_the_gateway_has_both_formats_and_exemplars_too() -> None:
    metrics = GatewayMetrics()
    metrics.observe("request_seconds", 0.3, "m", trace_id=OTHER)
    text = metrics.exposition(PROMETHEUS).body.decode()
    found = [
        sample.exemplar for family in open_families(text) for sample in family.samples if sample.exemplar
    ]
    assert [exemplar.labels for exemplar in found] == [{"trace_id": OTHER}]
    assert metrics.exposition().media_type == PLAIN


@contextmanager
def scraped(metrics: Metrics) -> Iterator[str]:
    """A web server with the metrics at /metrics. Yields its host and port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, media_type = metrics.exposition(self.headers["accept"] or "")
            self.send_response(200)
            self.send_header("content-type", media_type)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(url: str, path: str, query: str) -> Any:
    with urlopen(
        f"{url}/api/v1/{path}?query={quote(query)}&start=0&end={time.time() + 60}", timeout=5
    ) as answer:
        return json.load(answer)["data"]


def until(read: Callable[[], Any]) -> Any:
    """Read again until there is something."""
    deadline = time.monotonic() + 20
    while not (found := read()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_prometheus_stores_exemplars_and_every_series() -> None:
    """Prometheus asks for OpenMetrics, accepts the colons of the names, and finds the trace of a bucket."""
    metrics = traced()
    with (
        scraped(metrics) as target,
        prometheus_server(target, "--enable-feature=exemplar-storage") as url,
    ):
        found = until(lambda: ask(url, "query_exemplars", "fovea:ttft_seconds_bucket"))
        assert [entry["labels"]["trace_id"] for series in found for entry in series["exemplars"]] == [TRACE]
        assert found[0]["seriesLabels"]["le"] == "0.2"
        assert until(lambda: ask(url, "query", 'up{job="fovea"}')["result"])[0]["value"][1] == "1"
        exported = plain_families(metrics.exposition().body.decode())
        names = {sample.name for family in exported for sample in family.samples}

        def lacking() -> set[str]:
            listed = ask(url, "query", '{job="fovea"}')["result"]
            return names - {one["metric"]["__name__"] for one in listed}

        assert until(lambda: not lacking()), f"Prometheus lacks {lacking()}"
        blocks = ask(url, "query", 'vllm:cache_config_info{engine="0",block_size="16"}')["result"]
        assert blocks[0]["metric"]["num_gpu_blocks"] == "8"
