"""The exposition, read back with Prometheus's own parser."""

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
    """Value by name and label values, buckets left out."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(metrics).values()
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def made(**numbers: float) -> Metrics:
    return Metrics(lambda: {**NUMBERS, **numbers}, "model", "1.2")


def test_every_name_of_the_table_is_there() -> None:
    found = families(made())
    for name, text in {**GAUGES, **COUNTERS}.items():
        family = found[f"fovea:{name}"]
        assert family.type == ("gauge" if name in GAUGES else "counter")
        assert family.documentation == text
    told = samples(made())
    for name in GAUGES:
        assert told[(f"fovea:{name}",)] == NUMBERS[name]
    for name in COUNTERS:
        assert told[(f"fovea:{name}_total",)] == NUMBERS[name]


def test_every_name_is_ours_and_explained() -> None:
    for name, family in families(made()).items():
        assert name.startswith(("fovea:", "vllm:", "arr_coc_"))
        assert family.documentation


def test_dashboards_made_for_vllm_find_its_names_with_the_same_values() -> None:
    metrics = made()
    metrics.observe_first_token(0.25)
    metrics.observe_gap(0.01)
    told = samples(metrics)
    for alias, name in ALIASES.items():
        suffix = "_total" if name in COUNTERS else ""
        if name != "kv_usage":
            assert told[(f"{alias}{suffix}", "model")] == NUMBERS[name]
    assert (
        told[("vllm:kv_cache_usage_perc", "model")] == NUMBERS["kv_blocks_used"] / NUMBERS["kv_blocks_total"]
    )
    assert told[("vllm:time_to_first_token_seconds_sum", "model")] == 0.25
    assert told[("vllm:inter_token_latency_seconds_sum", "model")] == 0.01
    assert told[("vllm:time_per_output_token_seconds_count", "model")] == 1


def test_refusals_are_counted_by_their_code() -> None:
    metrics = made()
    metrics.count_refusal("image_too_large")
    metrics.count_refusal("image_too_large")
    assert samples(metrics)[("fovea:refused_total", "image_too_large")] == 2


def test_what_an_engine_does_not_tell_is_zero() -> None:
    told = samples(Metrics(dict, "model", "1.2"))
    assert all(told[(f"fovea:{name}",)] == 0 for name in GAUGES)
    assert told[("fovea:info", "model", "1.2")] == 1


def test_numbers_are_read_when_they_are_scraped() -> None:
    numbers = {"kv_blocks_used": 1.0}
    metrics = Metrics(lambda: numbers, "model", "1.2")
    assert samples(metrics)[("fovea:kv_blocks_used",)] == 1
    numbers["kv_blocks_used"] = 5.0
    assert samples(metrics)[("fovea:kv_blocks_used",)] == 5


def test_requests() -> None:
    metrics = made()
    for status in (200, 200, 429):
        metrics.observe_request("/v1/x", status, 0.5)
    told = samples(metrics)
    assert told[("fovea:requests_total", "/v1/x", "200")] == 2
    assert told[("fovea:requests_total", "/v1/x", "429")] == 1
    assert told[("fovea:request_seconds_count", "/v1/x")] == 3
    assert told[("fovea:request_seconds_sum", "/v1/x")] == 1.5


def test_a_requests_bill() -> None:
    metrics = made()
    metrics.count_images(2)
    metrics.count_videos(1)
    metrics.observe_first_token(7)
    metrics.observe_delta(Delta(0, "a"))
    metrics.observe_gap(0.1)
    metrics.observe_delta(Delta(1, "", finish_reason="length"))
    usage, timings = Usage(10, 5, 8, 4), StageTimings(1, 2, 3, 4, 5, 6, 7, 8)
    metrics.observe_delta(Delta(0, "", finish_reason="stop", usage=usage, timings=timings))
    told = samples(metrics)
    kinds = {"prompt": 10, "completion": 5, "cached": 8, "image": 4}
    assert {kind: told[("fovea:tokens_total", kind)] for kind in kinds} == kinds
    assert told[("fovea:finished_total", "stop")] == told[("fovea:finished_total", "length")] == 1
    assert (told[("fovea:images_total",)], told[("fovea:videos_total",)]) == (2, 1)
    assert told[("fovea:prompt_tokens_sum",)] == 10
    assert told[("fovea:ttft_seconds_sum",)] == 7
    assert told[("fovea:itl_seconds_count",)] == 1
    stages = [told[("fovea:stage_seconds_sum", stage)] for stage in STAGES]
    assert stages == [
        timings.fetch,
        timings.media_decode,
        timings.preprocess,
        timings.queue,
        timings.encode,
        timings.prefill,
        timings.decode,
    ]
    assert told[("vllm:request_queue_time_seconds_sum", "model")] == timings.queue
    assert told[("fovea:answer_seconds_sum",)] == timings.ttft + timings.decode
    assert told[("vllm:request_success_total", "stop", "model")] == 1
    assert told[("vllm:prompt_tokens_total", "model")] == 10


def test_two_servers_of_one_process_count_apart() -> None:
    one, two = made(), made()
    one.count_images(3)
    assert samples(two)[("fovea:images_total",)] == 0


def test_odd_names_of_models_are_escaped() -> None:
    metrics = Metrics(dict, 'a "quoted" \\ name\n', "1.2")
    assert samples(metrics)[("fovea:info", 'a "quoted" \\ name\n', "1.2")] == 1
