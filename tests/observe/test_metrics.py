"""The exported metrics, parsed with Prometheus's own parser."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from fovea.core.types import Delta, StageTimings, Usage
from fovea.observe.metrics import Metrics
from fovea.observe.table import ALIASES, COUNTERS, GAUGES, STAGES

NUMBERS = {name: float(at) for at, name in enumerate((*GAUGES, *COUNTERS), 1)}


def families(metrics: Metrics) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(metrics.exposition().decode())}


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Values by name and label values, without buckets."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(metrics).values()
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def new_metrics(**numbers: float) -> Metrics:
    return Metrics(lambda: {**NUMBERS, **numbers}, "model", "1.2")


def test_every_name_of_the_table_is_exported() -> None:
    exported = families(new_metrics())
    for name, text in {**GAUGES, **COUNTERS}.items():
        family = exported[f"fovea:{name}"]
        assert family.type == ("gauge" if name in GAUGES else "counter")
        assert family.documentation == text
    values = samples(new_metrics())
    for name in GAUGES:
        assert values[(f"fovea:{name}",)] == NUMBERS[name]
    for name in COUNTERS:
        assert values[(f"fovea:{name}_total",)] == NUMBERS[name]


def test_every_name_has_a_known_prefix_and_a_help_text() -> None:
    for name, family in families(new_metrics()).items():
        assert name.startswith(("fovea:", "vllm:", "arr_coc_"))
        assert family.documentation


def test_vllms_names_have_the_same_values() -> None:
    metrics = new_metrics()
    metrics.observe_first_token(0.25)
    metrics.observe_gap(0.01)
    values = samples(metrics)
    for alias, name in ALIASES.items():
        suffix = "_total" if name in COUNTERS else ""
        if name != "kv_usage":
            assert values[(f"{alias}{suffix}", "model")] == NUMBERS[name]
    assert (
        values[("vllm:kv_cache_usage_perc", "model")]
        == NUMBERS["kv_blocks_used"] / NUMBERS["kv_blocks_total"]
    )
    assert values[("vllm:time_to_first_token_seconds_sum", "model")] == 0.25
    assert values[("vllm:inter_token_latency_seconds_sum", "model")] == 0.01
    assert values[("vllm:time_per_output_token_seconds_count", "model")] == 1


def test_refusals_are_counted_by_their_code() -> None:
    metrics = new_metrics()
    metrics.count_refusal("image_too_large")
    metrics.count_refusal("image_too_large")
    assert samples(metrics)[("fovea:refused_total", "image_too_large")] == 2


def test_numbers_that_an_engine_does_not_report_are_zero() -> None:
    values = samples(Metrics(dict, "model", "1.2"))
    assert all(values[(f"fovea:{name}",)] == 0 for name in GAUGES)
    assert values[("fovea:info", "model", "1.2")] == 1


def test_numbers_are_read_when_they_are_scraped() -> None:
    numbers = {"kv_blocks_used": 1.0}
    metrics = Metrics(lambda: numbers, "model", "1.2")
    assert samples(metrics)[("fovea:kv_blocks_used",)] == 1
    numbers["kv_blocks_used"] = 5.0
    assert samples(metrics)[("fovea:kv_blocks_used",)] == 5


def test_requests() -> None:
    metrics = new_metrics()
    for status in (200, 200, 429):
        metrics.observe_request("/v1/x", status, 0.5)
    values = samples(metrics)
    assert values[("fovea:requests_total", "/v1/x", "200")] == 2
    assert values[("fovea:requests_total", "/v1/x", "429")] == 1
    assert values[("fovea:request_seconds_count", "/v1/x")] == 3
    assert values[("fovea:request_seconds_sum", "/v1/x")] == 1.5


def test_tokens_and_timings_of_a_request() -> None:
    metrics = new_metrics()
    metrics.count_images(2)
    metrics.count_videos(1)
    metrics.observe_first_token(7)
    metrics.observe_delta(Delta(0, "a"))
    metrics.observe_gap(0.1)
    metrics.observe_delta(Delta(1, "", finish_reason="length"))
    usage, timings = Usage(10, 5, 8, 4), StageTimings(1, 2, 3, 4, 5, 6, 7, 8)
    metrics.observe_delta(Delta(0, "", finish_reason="stop", usage=usage, timings=timings))
    values = samples(metrics)
    kinds = {"prompt": 10, "completion": 5, "cached": 8, "image": 4}
    assert {kind: values[("fovea:tokens_total", kind)] for kind in kinds} == kinds
    assert values[("fovea:finished_total", "stop")] == values[("fovea:finished_total", "length")] == 1
    assert (values[("fovea:images_total",)], values[("fovea:videos_total",)]) == (2, 1)
    assert values[("fovea:prompt_tokens_sum",)] == 10
    assert values[("fovea:ttft_seconds_sum",)] == 7
    assert values[("fovea:itl_seconds_count",)] == 1
    stages = [values[("fovea:stage_seconds_sum", stage)] for stage in STAGES]
    assert stages == [
        timings.fetch,
        timings.media_decode,
        timings.preprocess,
        timings.queue,
        timings.encode,
        timings.prefill,
        timings.decode,
    ]
    assert values[("vllm:request_queue_time_seconds_sum", "model")] == timings.queue
    assert values[("fovea:answer_seconds_sum",)] == timings.ttft + timings.decode
    assert values[("vllm:request_success_total", "stop", "model")] == 1
    assert values[("vllm:prompt_tokens_total", "model")] == 10


def test_two_servers_in_one_process_count_separately() -> None:
    one, two = new_metrics(), new_metrics()
    one.count_images(3)
    assert samples(two)[("fovea:images_total",)] == 0


def test_unusual_model_names_are_escaped() -> None:
    metrics = Metrics(dict, 'a "quoted" \\ name\n', "1.2")
    assert samples(metrics)[("fovea:info", 'a "quoted" \\ name\n', "1.2")] == 1
