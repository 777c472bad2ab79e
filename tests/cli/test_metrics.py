"""fovea metrics: the table is complete, and a comparison with a server finds what differs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from fovea.cli.main import main
from fovea.cli.metrics import exported_names, gateway_rows, names_of, server_rows
from fovea.gateway.metrics import Metrics as GatewayMetrics
from fovea.observe.aliases import ALIASES, FOREIGN
from fovea.observe.device import Devices
from fovea.observe.metrics import Metrics
from tests.observe.test_device import FakeNvml

DOCUMENTED = [
    "vision_encoder_inference_ms",
    "vision_encoder_throughput_images_per_sec",
    "vision_encoder_gpu_util_percent",
    "fusion_layer_latency_ms",
    "arr_coc_requests_total",
    "arr_coc_latency_seconds",
    "arr_coc_avg_tokens_per_patch",
    "arr_coc_relevance_score_dist",
    "arr_coc_lod_allocation_time_ms",
    "arr_coc_opponent_processing_balance",
    "arr_coc_token_allocation",
    "arr_coc_propositional_score",
    "arr_coc_perspectival_score",
    "arr_coc_participatory_score",
    "vllm_time_to_first_token_seconds",
    "vllm_time_per_output_token_seconds",
    "vllm_request_e2e_time_seconds",
    "vllm_request_success_total",
    "vllm_num_requests_running",
    "vllm_num_requests_waiting",
    "vllm_gpu_cache_usage_perc",
    "vllm_gpu_memory_usage_bytes",
    "vllm_request_prompt_tokens",
    "vllm_request_generation_tokens",
    "vllm_request_params_best_of",
    "gpu_memory_used_bytes",
]
TRANSLATED = [
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_request_duration_us",
    "nv_inference_exec_count",
    "nv_inference_batch_size",
    "nv_kv_cache_memory_usage_bytes",
    "nv_kv_cache_blocks_used",
    "nv_kv_cache_blocks_available",
    "vision_encode_duration_us",
    "tokens_generated_per_second",
    "time_to_first_token_us",
    "gpu_memory_reserved_bytes",
    "triton_request_queue_depth",
]


def loaded_server() -> Metrics:
    """The metrics of a server with a loaded model and GPUs."""
    devices = Devices(FakeNvml)
    devices.read()
    return Metrics(lambda: {"kv_blocks_total": 4, "kv_block_tokens": 16}, "model", "1.2", devices)


def text(metrics: Any) -> str:
    return str(metrics.exposition().body.decode())


def test_the_table_lists_exactly_what_is_exported() -> None:
    for metrics, rows in ((loaded_server(), server_rows()), (GatewayMetrics(), gateway_rows())):
        listed = [name for row in rows for name in names_of(row)]
        assert len(set(listed)) == len(listed)
        assert set(listed) == exported_names(text(metrics))


def test_types_labels_and_texts_of_the_table_are_those_of_the_metrics() -> None:
    exposed = text(loaded_server())
    for row in server_rows():
        assert f"# TYPE {row.name} {row.kind}\n" in exposed
        assert f"# HELP {row.name} {row.text}\n" in exposed
        labels = re.search(rf"^{row.name}(?:_bucket|)\{{(.*)\}} ", exposed, re.M)
        if labels:
            assert set(re.findall(r'(\w+)="', labels[1])) - {"le"} == set(row.labels)


def test_every_alias_and_translation_leads_to_a_metric() -> None:
    own = {row.name for row in (*server_rows(), *gateway_rows())}
    copied = [alias.name for row in server_rows() for alias in row.aliases]
    assert sorted(copied) == sorted(alias.name for alias in ALIASES), (
        "an alias of a metric that does not exist"
    )
    for one in FOREIGN:
        named = re.findall(r"(?:fovea|vllm)[:_][a-z_]+", one.query)
        assert {name if name in own else re.sub("_(bucket|sum|count)$", "", name) for name in named} <= own
        assert one.query or one.note


def test_every_name_of_the_documents_is_exported_or_translated() -> None:
    exported = exported_names(text(loaded_server()))
    assert set(DOCUMENTED) <= exported
    translated = {re.sub(r"\{.*", "", one.name) for one in FOREIGN}
    assert set(TRANSLATED) <= translated
    assert not {re.sub(r"\{.*", "", one.name) for one in FOREIGN} & exported


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The text and the status of the answer of /metrics, and the URL and headers that were sent."""
    told: dict[str, Any] = {"status": 200, "text": ""}

    def send(method: str, url: str, headers: dict[str, str]) -> tuple[int, bytes]:
        told["url"], told["headers"] = url, headers
        return told["status"], told["text"].encode()

    monkeypatch.setattr("fovea.cli.common._send", send)
    return told


def check(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = main(["metrics", "--url", "http://host:1/", *options])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_server_is_compared_with_the_table(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answers["text"] = text(loaded_server())
    code, said = check(capsys, "--api-key", "k")
    assert code == 0
    assert re.fullmatch(r"(\d+) of \1 names are exported\n", said)
    assert (answers["url"], answers["headers"]) == ("http://host:1/metrics", {"Authorization": "Bearer k"})

    answers["text"] = text(Metrics(dict, "model", "1.2"))
    code, said = check(capsys)
    assert code == 0
    assert "not here: fovea:device_power_watts" in said
    assert "missing" not in said

    lines = (line for line in text(loaded_server()).splitlines() if "vllm:num_preemptions" not in line)
    answers["text"] = "\n".join((*lines, "# TYPE strange gauge", "strange 1", ""))
    code, said = check(capsys)
    assert code == 1
    assert "missing: fovea:preemptions_total" in said
    assert "unknown: strange" in said


def test_several_workers_name_every_metric_before_they_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    (tmp_path / f"counter_{os.getpid()}.db").touch()
    monkeypatch.setattr("fovea.gateway.metrics.MultiProcessCollector", NothingCounted)
    assert exported_names(text(GatewayMetrics())) == {row.name for row in gateway_rows()}


class NothingCounted:
    """The collector of several workers, before any of them has counted something."""

    def __init__(self, registry: Any) -> None:
        pass

    def collect(self) -> list[Any]:
        return []


def test_a_gateway_is_recognized(answers: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    answers["text"] = text(GatewayMetrics())
    assert check(capsys)[0] == 0
    answers["text"] = answers["text"].replace("fovea_gateway_cost", "fovea_gateway_price")
    code, said = check(capsys)
    assert code == 1
    assert "missing: fovea_gateway_cost_total" in said
    assert "unknown: fovea_gateway_price_total" in said


@pytest.mark.parametrize(("status", "body", "message"), [
    (401, "", "status 401"),
    (200, "{]}", "text format"),
    (200, "<html>", "text format"),
])  # fmt: skip
def test_other_answers_are_refused(
    status: int, body: str, message: str, answers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answers |= {"status": status, "text": body}
    code, said = check(capsys)
    assert code == 2
    assert message in said


def test_without_a_url_everything_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Markdown tables with lines of 400 columns were printed here, which no terminal shows."""
    assert main(["metrics"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if len(line) > 80 and " " in line.strip()] == []
    words = out.split()
    for row in (*server_rows(), *gateway_rows()):
        assert set(names_of(row)) <= {word.strip(",") for word in words}
        assert " ".join(row.text.split()) in " ".join(words)
    assert all(one.name in out for one in FOREIGN)
