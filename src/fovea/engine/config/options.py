"""All settings of the engine as one flat set of keyword arguments, for type checkers."""

from __future__ import annotations

from typing import TypedDict


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of `EngineConfig.of` and `Engine.from_pretrained`.

    A test compares it with the settings.
    """

    dtype: str
    quantization: str
    device: str
    threads: int
    pin_threads: bool
    kernels: str
    decode_graphs: str
    compile: str
    encoder_engines: str
    revision: str
    tool_format: str
    reasoning: str
    special_tokens_in_text: bool
    block_size: int
    kv_cache_mib: int
    kv_blocks: int
    kv_host_mib: int
    state_cache_mib: int
    state_spacing: int
    kv_ttl_s: int
    max_context: int
    prefix_cache: bool
    embed_cache_mib: int
    embed_host_mib: int
    embed_disk_dir: str
    embed_disk_mib: int
    embed_ttl_s: int
    region_cache_mib: int
    pixel_pool_mib: int
    pixel_cache_mib: int
    pixel_ttl_s: int
    preprocess_workers: int
    frame_workers: int
    policy: str
    max_passes: int
    pace: float
    target_itl_ms: int
    target_ttft_ms: int
    target_percentile: float
    when_late: str
    max_running: int
    max_step_tokens: int
    max_step_visual_tokens: int
    max_draft_tokens: int
    max_queue: int
    when_full: str
    detail_policy: str
    degrade_from: float
    degrade_by: str
    visual_tokens: str
