"""The route /metrics of a running server: formats, names of other systems, and a bounded number of series."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from fovea.cli.main import main
from tests.server.support import Server

CHAT = "/v1/chat/completions"


def chat(**body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, **body}


def series(server: Server) -> dict[tuple[str, ...], float]:
    """All values, by the name and the sorted label values."""
    samples = (sample for family in plain_families(server.get("/metrics").text) for sample in family.samples)
    return {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}


def test_unknown_routes_models_and_fields_add_no_series(server: Server) -> None:
    def flood(client: httpx.Client, number: int) -> None:
        client.get(f"/v1/none-{number}")
        client.get(f"/admin/none-{number}")
        client.post(CHAT, json=chat(model=f"model-{number}"))
        client.post(CHAT, json=chat(**{f"field_{number}": 1}))

    with server.client() as client:
        flood(client, 0)
        before = set(series(server))
        for number in range(1, 20):
            flood(client, number)
    assert set(series(server)) == before


def test_openmetrics_is_negotiated(server: Server) -> None:
    answer = server.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"})
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    names = {family.name for family in open_families(answer.text)}
    assert {
        "fovea:requests",
        "vllm:num_requests_running",
        "process_open_fds",
        "cgroup_memory_usage_bytes",
    } <= names
    plain = server.get("/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_a_running_server_exports_every_name(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--url", server.url]) == 0
    assert "not here: vllm:cache_config_info" not in capsys.readouterr().out


def test_an_answer_moves_the_documents_names(server: Server) -> None:
    before = series(server)
    assert server.post(CHAT, chat(n=2, max_tokens=3)).status_code == 200
    after = series(server)

    def grown(*name: str) -> float:
        return after[name] - before.get(name, 0.0)

    model = ("0", server.engine.info.name)
    assert grown("arr_coc_requests_total") == grown("arr_coc_latency_seconds_count") == 1
    assert grown("vllm_request_params_best_of_sum", *model) == 2
    assert grown("vllm:request_params_max_tokens_sum", *model) == 3
    assert grown("vllm_request_e2e_time_seconds_count", *model) == 1
    # One is measured in the engine, the other where the answer reaches the server: neither bounds the other.
    assert grown("arr_coc_latency_seconds_sum") > 0
    assert grown("fovea:ttft_seconds_sum") > 0
