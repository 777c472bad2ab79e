"""The exported metrics, parsed with Prometheus's own parser."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fovea.core.types import Delta, StageTimings, Usage
from fovea.engine.config.schedule import DRAFTERS as NAMES
from fovea.observe.aliases import ALIASES, CACHE_CONFIG, CACHE_CONFIG_LABELS
from fovea.observe.metrics import Metrics, RateWindow
from fovea.observe.table import COUNTERS, DRAFTERS, GAUGES, LABELLED, STAGES, labelled_key

MODEL = {"model_name": "model", "engine": "0"}
NUMBERS = {name: float(at) for at, name in enumerate((*GAUGES, *COUNTERS), 1)}


def families(metrics: Metrics) -> dict[str, Any]:
    return {
        family.name: family for family in text_string_to_metric_families(metrics.exposition().body.decode())
    }


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Values by name and label values, without buckets."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(metrics).values()
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The value of one series."""
    found = [
        sample.value
        for family in families(metrics).values()
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    assert len(found) == 1, f"{len(found)} series {name} {labels}"
    return float(found[0])


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


def test_counters_with_a_label_have_a_series_for_every_value() -> None:
    """Also for those that an engine does not report: a rate needs the 0 before the first increment."""
    metrics = new_metrics(**{labelled_key("drafter_tokens", "prompt"): 7.0, "drafter_tokens:else": 9.0})
    values = samples(metrics)
    for name, row in LABELLED.items():
        exported = {key[1]: at for key, at in values.items() if key[0] == f"fovea:{name}_total"}
        assert tuple(exported) == row.values
        expected = {"prompt": 7.0} if name == "drafter_tokens" else {}
        assert exported == dict.fromkeys(row.values, 0.0) | expected
    assert DRAFTERS[1:] == NAMES


def test_drafts_have_vllms_names() -> None:
    name = "accepted_draft_tokens_per_position"
    metrics = new_metrics(**{labelled_key(name, place): float(9 - place) for place in range(3)})
    for place, count in ((0, 9), (2, 7), (3, 0)):
        labels = {**MODEL, "position": str(place)}
        assert value(metrics, "vllm:spec_decode_num_accepted_tokens_per_pos_total", **labels) == count
    assert value(metrics, "vllm:spec_decode_num_drafts_total", **MODEL) == NUMBERS["verifications"]
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total", **MODEL) == NUMBERS["draft_tokens"]


def test_every_name_has_a_known_prefix_and_a_help_text() -> None:
    prefixes = (
        "fovea:",
        "vllm:",
        "vllm_",
        "arr_coc_",
        "vision_encoder_",
        "fusion_layer_",
        "process_",
        "cgroup_",
    )
    for name, family in families(new_metrics()).items():
        assert name.startswith(prefixes)
        assert family.documentation


def test_vllms_names_have_the_same_values_and_vllms_labels() -> None:
    metrics = new_metrics(step_tokens_le_1=2, step_tokens_le_inf=5, step_tokens_sum=70)
    metrics.observe_first_token(0.25)
    metrics.observe_gap(0.01)
    for alias in ALIASES:
        suffix = "_total" if alias.of in COUNTERS else ""
        if alias.of in (*GAUGES, *COUNTERS) and alias.of_model:
            assert value(metrics, alias.name + suffix, **MODEL) == NUMBERS[alias.of]
    share = NUMBERS["kv_blocks_used"] / NUMBERS["kv_blocks_total"]
    assert value(metrics, "vllm:kv_cache_usage_perc", **MODEL) == share
    assert value(metrics, "vllm_gpu_cache_usage_perc", **MODEL) == share
    assert value(metrics, "vllm:time_to_first_token_seconds_sum", **MODEL) == 0.25
    assert value(metrics, "vllm_time_to_first_token_seconds_bucket", le="0.25", **MODEL) == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_sum", **MODEL) == 0.01
    assert value(metrics, "vllm:time_per_output_token_seconds_count", **MODEL) == 1
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="1.0", **MODEL) == 2
    assert value(metrics, "vllm:iteration_tokens_total_count", **MODEL) == 5
    assert value(metrics, "vllm:iteration_tokens_total_sum", **MODEL) == 70
    blocks = {name: f"{NUMBERS[of]:.0f}" for name, of in CACHE_CONFIG_LABELS.items()}
    assert value(metrics, CACHE_CONFIG, **MODEL, **blocks) == 1


def test_names_of_the_documents_have_the_units_that_they_name() -> None:
    times = {"image_encode_seconds_le_0.01": 3.0, "image_encode_seconds_le_inf": 4.0}
    metrics = new_metrics(**times, image_encode_seconds_sum=0.5)
    assert value(metrics, "vision_encoder_inference_ms_bucket", le="10.0") == 3
    assert value(metrics, "vision_encoder_inference_ms_count") == 4
    assert value(metrics, "vision_encoder_inference_ms_sum") == 500
    assert value(metrics, "fusion_layer_latency_ms_count") == 0


def test_rates_cover_the_last_minute() -> None:
    now, figures = [100.0], {"images_encoded": 0.0, "encode_seconds": 0.0}
    metrics = Metrics(lambda: figures, "model", "1.2", clock=lambda: now[0])
    for at, images, busy in ((110, 30, 5), (160, 80, 30), (200, 80, 30), (221, 80, 30)):
        now[0], figures["images_encoded"], figures["encode_seconds"] = at, images, busy
        rate = value(metrics, "vision_encoder_throughput_images_per_sec")
        percent = value(metrics, "vision_encoder_gpu_util_percent")
        # At 200 the oldest sample is that of 110; at 221 it is that of 160.
        assert rate == {110: 3, 160: 80 / 60, 200: 50 / 90, 221: 0}[at]
        assert percent == pytest.approx({110: 50, 160: 50, 200: 100 * 25 / 90, 221: 0}[at])


def test_frequent_scrapes_do_not_enlarge_the_window() -> None:
    window = RateWindow(0.0)
    rates = [window.rate(step / 100, step / 100) for step in range(1, 20_000)]
    assert rates == pytest.approx([1.0] * len(rates))
    assert len(window._samples) <= 62


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
    usage, timings = Usage(10, 5, 8, 4), StageTimings(1, 2, 3, 4, 5, 6, 7, 0.5, ttft=8)
    metrics.observe_delta(Delta(0, "", finish_reason="stop", usage=usage, timings=timings), choices=2)
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
        timings.detokenize,
    ]
    assert value(metrics, "vllm:request_queue_time_seconds_sum", **MODEL) == timings.queue
    assert values[("fovea:answer_seconds_sum",)] == timings.ttft + timings.decode
    assert value(metrics, "arr_coc_latency_seconds_sum") == timings.fetch + timings.media_decode + 8 + 7
    assert value(metrics, "vllm:request_inference_time_seconds_sum", **MODEL) == timings.prefill + 7
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum", **MODEL) == 7 * 2 / 3
    assert value(metrics, "vllm:request_success_total", finished_reason="stop", **MODEL) == 1
    assert value(metrics, "vllm:prompt_tokens_total", **MODEL) == 10
    assert value(metrics, "vllm:prompt_tokens_cached_total", **MODEL) == 8
    assert value(metrics, "vllm:request_prefill_kv_computed_tokens_sum", **MODEL) == 2


def test_two_servers_in_one_process_count_separately() -> None:
    one, two = new_metrics(), new_metrics()
    one.count_images(3)
    assert samples(two)[("fovea:images_total",)] == 0


def test_unusual_model_names_are_escaped() -> None:
    metrics = Metrics(dict, 'a "quoted" \\ name\n', "1.2")
    assert samples(metrics)[("fovea:info", 'a "quoted" \\ name\n', "1.2")] == 1
