"""Names of metrics in other systems that this server does not export, and what to use in their place.

Names that it does export are in `observe.aliases`. A query is PromQL.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

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
    Foreign("vllm:spec_decode_num_drafts", "vLLM", "", "drafts are counted in tokens only"),
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
