"""The names under which vLLM, and the documents that this server follows, know metrics of `observe.table`.

Dashboards, autoscalers and routers that were written for those names work with this server unchanged. An
alias is a copy that is made when the metrics are scraped; nothing is recorded twice. `vllm:x` is vLLM's own
spelling, `vllm_x` that of the documents.
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
    Alias("vllm:spec_decode_num_draft_tokens", "draft_tokens"),
    Alias("vllm:spec_decode_num_accepted_tokens", "accepted_draft_tokens"),
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
