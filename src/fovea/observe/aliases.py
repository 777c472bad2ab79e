"""Names of metrics in other systems: those that this server exports, too, and those that it does not.

`ALIASES` are the names under which vLLM, and the documents that this server follows, know metrics of
`observe.table`. Dashboards, autoscalers and routers that were written for those names work with this server
unchanged. An alias is a copy that is made when the metrics are scraped; nothing is recorded twice. `vllm:x`
is vLLM's own spelling, `vllm_x` that of the documents. `FOREIGN` are names that this server does not
export, with a query in PromQL that takes the place of each.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Source = Literal["vLLM", "vLLM, older", "documents"]
ENGINE = "0"
"""Value of the label `engine`, which vLLM counts from 0. A server has one engine."""


class Alias(NamedTuple):
    """Another name of a metric.

    name: the other name, without the suffix `_total` of counters.
    of: the metric's own name in one of the tables, without a prefix.
    source: the system that uses the name.
    value: the copy holds only the series whose label has this value, without the label; "": all series.
    label: name of the copy's label; "": that of the metric.
    scale: the copy's values are the metric's times this, for another unit.
    """

    name: str
    of: str
    source: Source = "vLLM"
    value: str = ""
    label: str = ""
    scale: float = 1.0

    @property
    def of_model(self) -> bool:
        """Whether its series have vLLM's labels `model_name` and `engine`."""
        return self.name.startswith(("vllm:", "vllm_"))


def _both(name: str, of: str, source: Source = "vLLM", **more: str) -> tuple[Alias, Alias]:
    """Return the aliases for vLLM's spelling of a name and for that of the documents."""
    return Alias(f"vllm:{name}", of, source, **more), Alias(f"vllm_{name}", of, "documents", **more)  # type: ignore[arg-type]


ALIASES: tuple[Alias, ...] = (
    *_both("num_requests_running", "requests_running"),
    *_both("num_requests_waiting", "requests_waiting"),
    Alias("vllm:kv_cache_usage_perc", "kv_usage"),
    *_both("gpu_cache_usage_perc", "kv_usage", "vLLM, older"),
    Alias("vllm:cpu_cache_usage_perc", "kv_host_usage", "vLLM, older"),
    Alias("vllm:num_preemptions", "preemptions"),
    Alias("vllm:prefix_cache_queries", "prefix_query_tokens"),
    Alias("vllm:prefix_cache_hits", "prefix_hit_tokens"),
    Alias("vllm:gpu_prefix_cache_queries", "prefix_query_tokens", "vLLM, older"),
    Alias("vllm:gpu_prefix_cache_hits", "prefix_hit_tokens", "vLLM, older"),
    Alias("vllm:mm_cache_queries", "pixel_cache_lookups"),
    Alias("vllm:mm_cache_hits", "pixel_cache_hits"),
    Alias("vllm:spec_decode_num_drafts", "verifications"),
    Alias("vllm:spec_decode_num_draft_tokens", "draft_tokens"),
    Alias("vllm:spec_decode_num_accepted_tokens", "accepted_draft_tokens"),
    Alias("vllm:spec_decode_num_accepted_tokens_per_pos", "accepted_draft_tokens_per_position"),
    Alias("vllm:iteration_tokens_total", "step_tokens"),
    Alias("vllm:prompt_tokens", "tokens", value="prompt"),
    Alias("vllm:prompt_tokens_cached", "tokens", value="cached"),
    Alias("vllm:generation_tokens", "generation_tokens"),
    *_both("request_success", "finished", label="finished_reason"),
    *_both("time_to_first_token_seconds", "ttft_seconds"),
    Alias("vllm:inter_token_latency_seconds", "itl_seconds"),
    *_both("time_per_output_token_seconds", "itl_seconds", "vLLM, older"),
    Alias("vllm:request_time_per_output_token_seconds", "tpot_seconds"),
    Alias("vllm:e2e_request_latency_seconds", "response_seconds"),
    Alias("vllm_request_e2e_time_seconds", "response_seconds", "documents"),
    Alias("vllm:request_queue_time_seconds", "stage_seconds", value="queue"),
    Alias("vllm:request_prefill_time_seconds", "stage_seconds", value="prefill"),
    Alias("vllm:request_decode_time_seconds", "stage_seconds", value="decode"),
    Alias("vllm:request_inference_time_seconds", "inference_seconds"),
    *_both("request_prompt_tokens", "prompt_tokens"),
    *_both("request_generation_tokens", "answer_tokens"),
    Alias("vllm:request_max_num_generation_tokens", "answer_tokens"),
    Alias("vllm:request_prefill_kv_computed_tokens", "computed_prompt_tokens"),
    Alias("vllm:request_params_n", "choices"),
    *_both("request_params_best_of", "choices", "vLLM, older"),
    Alias("vllm:request_params_max_tokens", "max_tokens"),
    Alias("vllm_gpu_memory_usage_bytes", "device_memory_used_bytes", "documents"),
    Alias("gpu_memory_used_bytes", "device_memory_used_bytes", "documents"),
    Alias("vision_encoder_inference_ms", "image_encode_seconds", "documents", scale=1000),
    Alias("vision_encoder_throughput_images_per_sec", "encoder_images_per_second", "documents"),
    Alias("vision_encoder_gpu_util_percent", "encoder_busy_share", "documents", scale=100),
    Alias("fusion_layer_latency_ms", "image_project_seconds", "documents", scale=1000),
    Alias("arr_coc_requests", "answers_begun", "documents"),
    Alias("arr_coc_latency_seconds", "response_seconds", "documents"),
)
CACHE_CONFIG = "vllm:cache_config_info"
CACHE_CONFIG_TEXT = "always 1; the labels name the size and the number of KV blocks"
CACHE_CONFIG_LABELS = {
    "block_size": "kv_block_tokens",
    "num_gpu_blocks": "kv_blocks_total",
    "num_cpu_blocks": "kv_host_blocks_total",
}
"""Names of figures by the label that has them. llm-d's router reads the first two."""


System = Literal["documents", "vLLM", "production-stack", "Triton", "SGLang"]


class Foreign(NamedTuple):
    """A name of another system.

    query: the same figure from the metrics of this server or gateway; "": there is none.
    note: what differs, or why there is nothing.
    """

    name: str
    system: System
    query: str
    note: str = ""


TRITON = "Triton itself exports it on :8002 when Fovea runs inside"
NO_TRITON = "Triton has no such name"
_HIT_RATE = "rate(fovea:prefix_hit_tokens_total[5m]) / rate(fovea:prefix_query_tokens_total[5m])"
_FAILED = 'rate(fovea:finished_total{reason="error"}[5m])'
_STAGE_US = "1e6 * rate(fovea:stage_seconds_sum[5m]) / rate(fovea:stage_seconds_count[5m])"
_BY_SHARE = "used share, from 0 to 1"

FOREIGN: tuple[Foreign, ...] = (
    Foreign("vision_encode_duration_us{stage}", "documents", _STAGE_US,
            'stages "preprocess" and "encode"; there is no stage after the encoder but the projector: '
            "fovea:image_project_seconds"),
    Foreign("tokens_generated_per_second", "documents", "rate(fovea:generation_tokens_total[1m])"),
    Foreign("time_to_first_token_us{quantile}", "documents",
            "1e6 * histogram_quantile(0.99, rate(fovea:ttft_seconds_bucket[5m]))"),
    Foreign("gpu_memory_reserved_bytes", "documents", "fovea:device_memory_total_bytes",
            "memory that the process has reserved is a part of fovea:device_memory_used_bytes"),
    Foreign("triton_request_queue_depth", "documents", "fovea:requests_waiting", NO_TRITON),
    Foreign('label model_version="v1"', "documents", "fovea:info",
            "the labels of fovea:info name model and version; add others by relabeling in Prometheus"),
    Foreign("nv_inference_request_success", "Triton", "fovea:finished_total", TRITON),
    Foreign("nv_inference_request_failure", "Triton", _FAILED, TRITON),
    Foreign("nv_inference_count", "Triton", "fovea:answers_begun_total", TRITON),
    Foreign("nv_inference_exec_count", "Triton", "fovea:engine_steps_total", TRITON),
    Foreign("nv_inference_request_duration_us", "Triton", "1e6 * fovea:request_seconds_sum",
            f"{TRITON}; it is a counter without quantiles"),
    Foreign("nv_inference_queue_duration_us", "Triton",
            '1e6 * fovea:stage_seconds_sum{stage="queue"}', TRITON),
    Foreign("nv_inference_compute_infer_duration_us", "Triton", "1e6 * fovea:inference_seconds_sum", TRITON),
    Foreign("nv_inference_pending_request_count", "Triton", "fovea:requests_waiting", TRITON),
    Foreign("nv_inference_batch_size{quantile}", "documents",
            "histogram_quantile(0.5, rate(fovea:step_sequences_bucket[5m]))", NO_TRITON),
    Foreign("nv_kv_cache_memory_usage_bytes", "documents", "fovea:kv_blocks_used * fovea:kv_block_bytes",
            NO_TRITON),
    Foreign("nv_kv_cache_blocks_used", "documents", "fovea:kv_blocks_used", NO_TRITON),
    Foreign("nv_kv_cache_blocks_available", "documents", "fovea:kv_blocks_total - fovea:kv_blocks_used",
            NO_TRITON),
    Foreign("nv_trt_llm_kv_cache_block_metrics", "Triton", "fovea:kv_usage",
            "only with its backend for TensorRT-LLM"),
    Foreign("nv_trt_llm_request_metrics", "Triton", "fovea:requests_running",
            "only with its backend for TensorRT-LLM; fovea:requests_waiting for waiting ones"),
    Foreign("nv_gpu_utilization", "Triton", "fovea:device_utilization_share", TRITON),
    Foreign("nv_gpu_memory_used_bytes", "Triton", "fovea:device_memory_used_bytes", TRITON),
    Foreign("nv_gpu_memory_total_bytes", "Triton", "fovea:device_memory_total_bytes", TRITON),
    Foreign("nv_gpu_power_usage", "Triton", "fovea:device_power_watts", TRITON),
    Foreign("nv_energy_consumption", "Triton", "fovea:device_energy_joules_total", TRITON),
    Foreign("vllm:num_requests_waiting_by_reason", "vLLM", "fovea:requests_waiting_image",
            "fovea:requests_waiting_ready for those that need no image encoded"),
    Foreign("vllm:num_requests_swapped", "vLLM", "",
            "not applicable: a preempted sequence is computed again. vLLM has dropped the name, too"),
    Foreign("vllm:gpu_prefix_cache_hit_rate", "vLLM", _HIT_RATE, "vLLM has dropped the name"),
    Foreign("vllm:cpu_prefix_cache_hit_rate", "vLLM", "", "vLLM has dropped the name"),
    Foreign("vllm:avg_prompt_throughput_toks_per_s", "vLLM", 'rate(fovea:tokens_total{kind="prompt"}[1m])',
            "vLLM has dropped the name"),
    Foreign("vllm:avg_generation_throughput_toks_per_s", "vLLM", "rate(fovea:generation_tokens_total[1m])",
            "vLLM has dropped the name"),
    Foreign("vllm:lora_requests_info", "vLLM", "", "not applicable: there are no adapters"),
    Foreign("vllm:engine_sleep_state", "vLLM", "", "not applicable: an engine does not sleep"),
    Foreign("vllm:corrupted_requests", "vLLM", "", "not applicable: numbers that are not finite fail a step"),
    Foreign("vllm:healthy_pods_total", "production-stack", "sum(fovea_gateway_backend_up)", "of the gateway"),
    Foreign("vllm:current_qps", "production-stack", "rate(fovea_gateway_attempts_total[1m])",
            "of the gateway, by backend"),
    Foreign("vllm:num_incoming_requests", "production-stack", "fovea_gateway_requests_total",
            "of the gateway, by model"),
    Foreign("sglang:num_running_reqs", "SGLang", "fovea:requests_running"),
    Foreign("sglang:num_queue_reqs", "SGLang", "fovea:requests_waiting"),
    Foreign("sglang:token_usage", "SGLang", "fovea:kv_usage", _BY_SHARE),
    Foreign("sglang:num_used_tokens", "SGLang", "fovea:kv_blocks_used * fovea:kv_block_tokens"),
    Foreign("sglang:max_total_num_tokens", "SGLang", "fovea:kv_blocks_total * fovea:kv_block_tokens"),
    Foreign("sglang:cache_hit_rate", "SGLang", _HIT_RATE),
    Foreign("sglang:cached_tokens_total", "SGLang", 'fovea:tokens_total{kind="cached"}'),
    Foreign("sglang:prompt_tokens_total", "SGLang", 'fovea:tokens_total{kind="prompt"}'),
    Foreign("sglang:generation_tokens_total", "SGLang", "fovea:generation_tokens_total"),
    Foreign("sglang:gen_throughput", "SGLang", "rate(fovea:generation_tokens_total[1m])"),
    Foreign("sglang:num_requests_total", "SGLang", "fovea:answers_begun_total"),
    Foreign("sglang:time_to_first_token_seconds", "SGLang", "fovea:ttft_seconds"),
    Foreign("sglang:inter_token_latency_seconds", "SGLang", "fovea:itl_seconds"),
    Foreign("sglang:e2e_request_latency_seconds", "SGLang", "fovea:response_seconds"),
    Foreign("sglang:cache_config_info{page_size,num_pages}", "SGLang", "vllm:cache_config_info"),
)  # fmt: skip
