"""Every metric by its name: what it counts and what dashboards made for vLLM call it.

GAUGES and COUNTERS are read from the engine and the media caches when they are scraped; TOTALS and SPREADS are told as
things happen. Names of GAUGES, COUNTERS and SPREADS get the prefix `fovea:`; counters are shown with `_total`.
"""

from __future__ import annotations

from typing import NamedTuple

Buckets = tuple[float, ...]


class Total(NamedTuple):
    """A counter that the server counts. labels: of ours; vLLM's have `model_name` before them."""

    text: str
    labels: tuple[str, ...] = ()


class Spread(NamedTuple):
    """A distribution. label: its one label. aliases: (value of the label, vLLM's name); "" where there is no label."""

    text: str
    buckets: Buckets
    label: str = ""
    aliases: tuple[tuple[str, str], ...] = ()


GAUGES = {
    "requests_running": "sequences that share the current step",
    "requests_waiting": "sequences that wait for blocks or a turn",
    "requests_waiting_ready": "of these, that need no image encoded first",
    "requests_waiting_image": "of these, that wait for an image to be encoded",
    "oldest_waiting_seconds": "how long the one has waited that waits longest",
    "oldest_waiting_ready_seconds": "the same, of those that need no image encoded first",
    "oldest_waiting_image_seconds": "the same, of those that wait for an image to be encoded",
    "kv_blocks_total": "KV blocks in the pool",
    "kv_blocks_used": "KV blocks that running sequences hold",
    "kv_blocks_cached": "KV blocks that a prefix could find",
    "kv_blocks_idle": "of these, blocks that no running sequence holds",
    "kv_blocks_used_visual": "of the used ones, those with a part of an image",
    "kv_blocks_cached_visual": "of those that could be found, those with a part of an image",
    "kv_host_blocks_total": "KV blocks of host memory for image prefixes",
    "kv_host_blocks": "of these, blocks that hold one",
    "kv_block_bytes": "bytes of a KV block",
    "encoder_engines": "built encoders that are loaded, one per grid",
    "region_cache_bytes": "bytes of encoded regions kept, of images that are seen in parts",
    "region_cache_capacity_bytes": "ceiling of these",
    "region_cache_entries": "encoded regions kept",
    "embed_cache_capacity_bytes": "ceiling of encoder outputs kept",
    "embed_cache_bytes": "bytes of encoder outputs kept",
    "embed_cache_entries": "encoder outputs kept",
    "embed_cache_held_bytes": "of these, bytes that requests are waiting for or reading",
    "embed_host_bytes": "bytes of encoder outputs in host memory",
    "embed_host_capacity_bytes": "ceiling of encoder outputs in host memory",
    "embed_host_entries": "encoder outputs in host memory",
    "embed_host_leaving_bytes": "bytes of encoder outputs that wait to be copied there",
    "embed_disk_bytes": "bytes of encoder outputs on disk",
    "embed_disk_capacity_bytes": "ceiling of encoder outputs on disk",
    "embed_disk_leaving_bytes": "bytes of encoder outputs that wait to be handed to the disk's writer",
    "embed_disk_entries": "encoder outputs on disk",
    "embed_disk_off": "1 when the disk made trouble and is not used any more",
    "fetch_cache_bytes": "bytes kept of what was fetched from URLs",
    "fetch_cache_capacity_bytes": "ceiling of these",
    "fetch_cache_entries": "URLs whose bytes are kept",
    "decoded_cache_bytes": "bytes of decoded images kept",
    "decoded_cache_capacity_bytes": "ceiling of these",
    "decoded_cache_entries": "decoded images kept",
    "image_store_bytes": "bytes of images that were sent ahead",
    "image_store_capacity_bytes": "ceiling of these",
    "image_store_entries": "images that were sent ahead",
    "pixel_bytes": "bytes of processed pixels that wait for the encoder",
    "pixel_cache_bytes": "bytes of processed pixels that nobody waits for",
    "pixel_cache_capacity_bytes": "ceiling of processed pixels, waited for or not",
    "pixel_cache_entries": "images whose processed pixels nobody waits for",
}
COUNTERS = {
    "prefix_query_tokens": "tokens looked up in the prefix cache",
    "prefix_hit_tokens": "tokens whose KV was found there",
    "kv_evictions": "KV blocks that a prefix could find and that were taken for something else",
    "kv_host_loads": "KV blocks that came back from host memory",
    "kv_host_evictions": "KV blocks of host memory that were dropped for room",
    "embed_cache_hits": "images whose encoder output was found",
    "embed_cache_misses": "images that had to be encoded",
    "failed_steps": "steps that raised; their requests got an error",
    "embed_cache_evictions": "encoder outputs dropped for room",
    "region_cache_hits": "regions whose encoding was found",
    "region_cache_misses": "regions that had to be encoded",
    "region_cache_evictions": "encoded regions dropped for room, the least relevant first",
    "pixel_cache_hits": "images whose processed pixels were found",
    "pixel_cache_misses": "images whose pixels had to be processed",
    "pixel_cache_evictions": "images whose processed pixels made room",
    "pixel_cache_expired": "images whose processed pixels were dropped for their age",
    "embed_cache_expired": "encoder outputs dropped for their age",
    "embed_host_hits": "encoder outputs that were read from host memory",
    "embed_host_misses": "encoder outputs that were looked for in host memory and not found",
    "embed_host_dropped": "encoder outputs not copied to host memory: too large, too old, or the copies too slow",
    "embed_host_evictions": "encoder outputs removed from host memory for room",
    "embed_host_expired": "encoder outputs removed from host memory for their age",
    "embed_disk_hits": "encoder outputs that were read from disk",
    "embed_disk_misses": "encoder outputs that were looked for on disk and not found",
    "embed_disk_writes": "encoder outputs written to disk",
    "embed_disk_dropped": "encoder outputs not written because the disk was too slow",
    "embed_disk_evictions": "encoder outputs removed from disk for room",
    "embed_disk_expired": "encoder outputs removed from disk for their age",
    "embed_disk_corrupt": "files that were damaged and removed",
    "fetch_cache_hits": "URLs that were not downloaded: kept, or being downloaded for another request",
    "fetch_cache_misses": "URLs that were downloaded",
    "fetch_cache_evictions": "fetched bytes dropped for room",
    "fetch_cache_expired": "fetched bytes dropped for their age",
    "fetch_cache_revalidations": "hits for which the URL's host was asked whether they still hold",
    "decoded_cache_hits": "images that were not decoded: kept, or being decoded for another request",
    "decoded_cache_misses": "images that were decoded",
    "decoded_cache_evictions": "decoded images dropped for room",
    "decoded_cache_expired": "decoded images dropped for their age",
    "image_store_hits": "images of requests that were named by the id of one sent ahead",
    "image_store_misses": "ids of images that were not here any more",
    "image_store_evictions": "images sent ahead that were dropped for room",
    "image_store_expired": "images sent ahead that were dropped for their age",
    "images_encoded": "images that the vision encoder ran for",
    "encoder_engine_hits": "of these, images that a built encoder was there for",
    "encoder_engine_misses": "images whose grid none of the built encoders is for",
    "encode_seconds": "seconds in the vision encoder",
    "engine_steps": "steps of the engine",
    "computed_tokens": "tokens computed, prompts and answers",
    "generation_tokens": "tokens generated",
    "preemptions": "sequences that lost their blocks and were recomputed",
    "integrity_errors": "times that the caches did not add up; anything but 0 is a defect",
}
# vLLM's name -> ours, a gauge or a counter.
ALIASES = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_query_tokens",
    "vllm:prefix_cache_hits": "prefix_hit_tokens",
    "vllm:generation_tokens": "generation_tokens",
}
# What the ARR-COC documents call relevance realization. Prometheus wants seconds; that one name says milliseconds.
RELEVANCE_GAUGES = {
    "arr_coc_avg_tokens_per_patch": "visual tokens per region of the image that was seen in parts last",
    "arr_coc_propositional_score": "mean of its propositional map",
    "arr_coc_perspectival_score": "mean of its perspectival map",
    "arr_coc_participatory_score": "mean of its participatory map",
}
TENSION_GAUGE = "arr_coc_opponent_processing_balance"
TENSIONS = ("compress_particularize", "exploit_explore", "focus_diversify")
RELEVANCE_SPREADS: dict[str, tuple[str, Buckets]] = {
    "arr_coc_relevance_score_dist": ("relevance of regions", tuple(step / 10 for step in range(1, 11))),
    "arr_coc_token_allocation": ("visual tokens given to a region", (0, 16, 64, 128, 200, 256, 400)),
    "arr_coc_lod_allocation_time_ms": (
        "milliseconds of balancing and attending",
        (0.25, 0.5, 1, 2, 4, 8, 16, 32),
    ),
}
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
STAGES = ("fetch", "media_decode", "preprocess", "queue", "encode", "prefill", "decode")
TOTALS = {
    "fovea:requests": Total("finished HTTP requests", ("route", "status")),
    "fovea:refused": Total("requests refused, by error code", ("code",)),
    "fovea:images": Total("images that requests brought"),
    "fovea:videos": Total("videos that requests brought"),
    "fovea:tokens": Total("tokens by kind; cached and image are parts of prompt", ("kind",)),
    "fovea:finished": Total("answers by why they ended", ("reason",)),
    "vllm:prompt_tokens": Total("fovea:tokens of kind prompt"),
    "vllm:request_success": Total("fovea:finished", ("finished_reason",)),
}
SPREADS = {
    "request_seconds": Spread("a request from its first to its last byte", SECONDS, "route"),
    "ttft_seconds": Spread(
        "arrival, images included, to first token; of every request that got one",
        SECONDS,
        aliases=(("", "vllm:time_to_first_token_seconds"),),
    ),
    "itl_seconds": Spread(
        "time between two tokens of an answer",
        SECONDS,
        aliases=(("", "vllm:inter_token_latency_seconds"), ("", "vllm:time_per_output_token_seconds")),
    ),
    "answer_seconds": Spread(
        "a request's stages together", SECONDS, aliases=(("", "vllm:e2e_request_latency_seconds"),)
    ),
    "stage_seconds": Spread(
        "seconds per stage of a request",
        SECONDS,
        "stage",
        tuple((stage, f"vllm:request_{stage}_time_seconds") for stage in ("queue", "prefill", "decode")),
    ),
    "prompt_tokens": Spread("tokens of a prompt", TOKENS, aliases=(("", "vllm:request_prompt_tokens"),)),
    "answer_tokens": Spread(
        "tokens of an answer, all choices", TOKENS, aliases=(("", "vllm:request_generation_tokens"),)
    ),
}
