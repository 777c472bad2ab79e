"""The table of all metrics of a server: names, labels, buckets and help texts.

The engine and the media caches report their current values by these names, and they are read when the metrics
are scraped; totals and spreads are recorded as requests proceed. Names get the prefix `fovea:`, and counters
the suffix `_total`; metrics of relevance realization have no prefix. `observe.aliases` lists the names under
which other systems know them.
"""

from __future__ import annotations

from typing import NamedTuple

from fovea.core.measure import keys_of

Buckets = tuple[float, ...]


class Distribution(NamedTuple):
    """A histogram that the engine keeps, as a `core.measure.Tally` of the same name and buckets."""

    text: str
    buckets: Buckets


class Labelled(NamedTuple):
    """A counter of the engine with a label. The figure of each of its values is called `labelled_key`.

    label: name of the label.
    values: all values that the label can have.
    """

    text: str
    label: str
    values: tuple[str, ...]


class Rate(NamedTuple):
    """A gauge: how much a counter grew per second during the last minute."""

    text: str
    counter: str


class Share(NamedTuple):
    """A gauge: one gauge divided by another; 0 if the other is 0."""

    text: str
    part: str
    whole: str


GAUGES = {
    "ready": "1 if the server accepts requests, 0 while it loads or ends",
    "requests_running": "sequences that share the current step",
    "requests_waiting": "sequences that wait for blocks or for other sequences",
    "requests_waiting_ready": "waiting sequences that need no image encoded first",
    "requests_waiting_image": "waiting sequences that wait for an image to be encoded",
    "oldest_waiting_seconds": "longest time that a waiting sequence has waited",
    "oldest_waiting_ready_seconds": "longest wait of a sequence that needs no image encoded first",
    "oldest_waiting_image_seconds": "longest wait of a sequence that waits for an image to be encoded",
    "queued_work_seconds": "estimated seconds of encoder and prompts of all requests without a first token",
    "queued_encode_seconds": "the encoder's part of queued_work_seconds",
    "memory_total_bytes": "GPU, at the start: its memory; the other memory_ figures are parts of it",
    "memory_others_bytes": "GPU, at the start: other processes, and CUDA itself",
    "memory_weights_bytes": "GPU, at the start: the model",
    "memory_libraries_bytes": "GPU, at the start: kernels and workspaces of libraries",
    "memory_step_bytes": "GPU, at the start: the largest step that the settings allow, and the largest image",
    "memory_graphs_bytes": "GPU, at the start: recorded CUDA graphs",
    "memory_outputs_bytes": "GPU, at the start: full caches of encoder outputs and regions",
    "memory_copies_bytes": "GPU, at the start: staging memory for KV on its way from and to host memory",
    "memory_headroom_bytes": "GPU, at the start: left free on purpose",
    "memory_kv_bytes": "GPU, at the start: the KV pool, and states",
    "peers_encode_ready": "peers that encode images and do not rest after a failure",
    "peers_prefill_ready": "peers that compute prompts and do not rest after a failure",
    "memory_spare_bytes": "GPU, at the start: what is left; below 0, the largest step does not fit",
    "speculating": "1 if the latest steps had time for drafts; 0: no drafter is set (speculate), or with so "
    "many sequences a draft costs more time than it is expected to save",
    "step_tokens_allowed": "most tokens of a step now; fewer than max_step_tokens after memory_retries",
    "sequences_allowed": "sequences that may run now, so that gaps stay within target_itl_ms",
    "step_time_margin": "how much longer than expected a step takes at target_percentile, as a factor",
    "target_itl_possible": "0 if a single decode takes longer than target_itl_ms, which is then ignored",
    "kv_blocks_total": "KV blocks in the pool",
    "kv_block_tokens": "tokens of a KV block",
    "kv_blocks_used": "KV blocks that running sequences hold",
    "kv_blocks_cached": "KV blocks in the prefix cache",
    "kv_blocks_idle": "KV blocks in the prefix cache that no running sequence holds",
    "kv_blocks_used_visual": "used KV blocks that hold a part of an image",
    "kv_blocks_cached_visual": "KV blocks in the prefix cache that hold a part of an image",
    "kv_host_blocks_total": "KV blocks of host memory for image prefixes",
    "kv_host_blocks": "KV blocks of host memory that hold an image prefix",
    "kv_block_bytes": "bytes of a KV block, without layers that have a sliding window",
    "window_blocks_total": "KV blocks in the pool of layers with a sliding window; 0: the model has none",
    "window_blocks_used": "KV blocks of layers with a sliding window that running sequences hold",
    "window_blocks_idle": "cached KV blocks of layers with a sliding window that no running sequence holds",
    "window_block_bytes": "bytes of a KV block of the layers with a sliding window",
    "state_slots_total": "slots for states of layers without KV; 0: the model has no such layers",
    "state_slots_used": "slots that running sequences use, for their states and for drafts",
    "state_checkpoints": "checkpoints: states from which later requests with the same prefix can continue",
    "state_checkpoint_bytes": "bytes of checkpoints",
    "state_capacity_bytes": "bytes of all slots for states",
    "encoder_engines": "built encoders that are loaded, one per grid",
    "region_cache_bytes": "bytes of encoded regions in the region cache",
    "region_cache_capacity_bytes": "ceiling of the region cache in bytes",
    "region_cache_entries": "encoded regions in the region cache",
    "embed_cache_capacity_bytes": "ceiling of cached encoder outputs in bytes",
    "embed_cache_bytes": "bytes of cached encoder outputs",
    "embed_cache_entries": "cached encoder outputs",
    "embed_cache_held_bytes": "bytes of cached encoder outputs that requests wait for or read",
    "embed_host_bytes": "bytes of encoder outputs in host memory",
    "embed_host_capacity_bytes": "ceiling of encoder outputs in host memory",
    "embed_host_entries": "encoder outputs in host memory",
    "embed_host_leaving_bytes": "bytes of encoder outputs that wait to be copied to host memory",
    "embed_disk_bytes": "bytes of encoder outputs on disk",
    "embed_disk_capacity_bytes": "ceiling of encoder outputs on disk",
    "embed_disk_leaving_bytes": "bytes of encoder outputs that wait to be handed to the disk's writer",
    "embed_disk_entries": "encoder outputs on disk",
    "embed_disk_off": "1 if the disk failed and is no longer used",
    "connections_open": "open connections of clients",
    "connections_idle": "open connections that wait for their next request",
    "connections_capacity": "most open connections",
    "traces_waiting": "traces that wait to be exported",
    "keys": "keys that the server knows, expired ones included",
    "keys_file_broken": "1 if the keys file cannot be used; the keys that were read last still apply",
    "fetch_cache_bytes": "bytes of cached downloads",
    "fetch_cache_capacity_bytes": "ceiling of cached downloads in bytes",
    "fetch_cache_entries": "URLs whose bytes are cached",
    "body_bytes": "bytes of request bodies that are arriving, or whose images are not read yet",
    "body_capacity_bytes": "ceiling of the bytes of request bodies",
    "media_held_bytes": "bytes of encoded images and videos that requests in flight hold",
    "media_held_capacity_bytes": "ceiling of encoded images and videos of requests in flight in bytes",
    "decoder_processes": "processes that decode images and videos",
    "decoded_cache_bytes": "bytes of cached decoded images",
    "decoded_cache_capacity_bytes": "ceiling of cached decoded images in bytes",
    "decoded_cache_entries": "cached decoded images",
    "response_store_bytes": "bytes of kept answers of /v1/responses",
    "response_store_capacity_bytes": "ceiling of kept answers in bytes",
    "response_store_entries": "kept answers",
    "image_store_bytes": "bytes of uploaded images",
    "image_store_capacity_bytes": "ceiling of uploaded images in bytes",
    "image_store_entries": "uploaded images",
    "pixel_bytes": "bytes of processed pixels that wait for the encoder",
    "pixel_cache_bytes": "bytes of processed pixels that no request waits for",
    "pixel_cache_capacity_bytes": "ceiling of all processed pixels in bytes",
    "pixel_cache_entries": "images whose processed pixels no request waits for",
}
COUNTERS = {
    "trace_spans_exported": "spans that the collector of traces took",
    "trace_spans_dropped": "spans and traces that the collector did not get: slow, unreachable, or refused",
    "verifications": "times that a step computed drafts of an answer",
    "draft_tokens": "tokens that were computed as drafts: expected ones, verified in one step",
    "drafts_left_out": "drafts that were expected to cost more time than they would save",
    "accepted_draft_tokens": "drafts that became part of an answer",
    "grammar_hits": "answer formats that were compiled already",
    "grammar_misses": "answer formats that had to be compiled",
    "bodies_refused": "request bodies that were refused for lack of room while they arrived",
    "prefix_query_tokens": "tokens looked up in the prefix cache",
    "prefix_hit_tokens": "tokens whose KV was in the prefix cache",
    "kv_evictions": "KV blocks of the prefix cache that were evicted to hold other tokens",
    "window_blocks_returned": "KV blocks that running sequences gave back because they lay behind the window",
    "state_evictions": "checkpoints that were evicted because their slot was needed",
    "kv_host_loads": "KV blocks that were copied back from host memory",
    "kv_host_evictions": "KV blocks of host memory that were evicted",
    "embed_cache_hits": "images whose encoder output was cached",
    "embed_cache_misses": "images that had to be encoded",
    "requests_refused_late": "requests refused because their first token would have been late",
    "requests_degraded_late": "requests whose images lost detail so that their first token was in time",
    "decode_steps": "steps in which a stream got a token",
    "late_steps": "steps with decodes that took longer than target_itl_ms, with the time since the last step",
    "failed_steps": "steps that raised an error; only the request that caused it ends",
    "memory_retries": "steps that did not fit into the device's memory and were tried again in halves",
    "memory_image_retries": "images that did not fit into the device's memory and were encoded again alone",
    "memory_failures": "requests that ended because they did not fit into the device's memory even alone",
    "embed_cache_evictions": "encoder outputs evicted for lack of room",
    "region_cache_hits": "regions whose encoding was cached",
    "region_cache_misses": "regions that had to be encoded",
    "region_cache_evictions": "encoded regions evicted for lack of room, the least relevant first",
    "pixel_cache_lookups": "images whose processed pixels were looked up: pixel_cache_hits and _misses",
    "pixel_cache_hits": "images whose processed pixels were cached",
    "pixel_cache_misses": "images whose pixels had to be processed",
    "pixel_cache_evictions": "images whose processed pixels were evicted for lack of room",
    "pixel_cache_expired": "images whose processed pixels expired",
    "embed_cache_expired": "encoder outputs that expired",
    "embed_host_hits": "encoder outputs that were read from host memory",
    "embed_host_misses": "lookups of encoder outputs in host memory without a result",
    "embed_host_dropped": "encoder outputs not copied to host memory: too large, too old, or copies too slow",
    "embed_host_evictions": "encoder outputs evicted from host memory for lack of room",
    "embed_host_expired": "encoder outputs in host memory that expired",
    "embed_disk_hits": "encoder outputs that were read from disk",
    "embed_disk_misses": "lookups of encoder outputs on disk without a result",
    "embed_disk_writes": "encoder outputs written to disk",
    "embed_disk_dropped": "encoder outputs not written because the disk was too slow",
    "embed_disk_evictions": "encoder outputs evicted from disk for lack of room",
    "embed_disk_expired": "encoder outputs on disk that expired",
    "embed_disk_corrupt": "files that were damaged and removed",
    "peer_encode_done": "images that peers have encoded for this engine",
    "peer_encode_failed": "images that a peer was asked to encode, in vain",
    "peer_encode_refused": "images that no peer was asked to encode, because all rest after failures",
    "peer_encode_seconds": "seconds in which requests waited for peers to encode images",
    "peer_prefill_done": "prompts that peers have computed for this engine",
    "peer_prefill_failed": "prompts that a peer was asked to compute, in vain",
    "peer_prefill_refused": "prompts that no peer was asked to compute, because all rest after failures",
    "peer_prefill_seconds": "seconds in which requests waited for peers to compute prompts",
    "event_messages": "messages about cached values that were sent to routers",
    "event_replays": "questions of routers for earlier messages about cached values",
    "transfers": "values that were fetched from peers",
    "transfers_failed": "values of peers that were lost, late or damaged, so that they are computed here",
    "transfer_bytes": "bytes of the values that were fetched from peers",
    "transfer_seconds": "seconds in which values were fetched from peers, without the work of the peers",
    "values_adopted": "blocks of keys and values, and states, of peers that were taken in",
    "offers": "values that were offered to peers",
    "offered_bytes": "bytes of the values that were offered to peers",
    "offers_refused": "values that were not offered to peers, because transfer_mib had no room",
    "connections_accepted": "connections of clients that were accepted",
    "fetch_cache_hits": "URLs that needed no download: cached, or in download for another request",
    "fetch_cache_misses": "URLs that were downloaded",
    "fetch_cache_evictions": "cached downloads evicted for lack of room",
    "fetch_cache_expired": "cached downloads that expired",
    "fetch_cache_revalidations": "hits that the URL's host confirmed as unchanged",
    "decoder_crashes": "decoding processes that died while they decoded",
    "decoder_ended": "decoding processes that the server ended: their time ran out, or their client left",
    "decoded_cache_hits": "images that needed no decoding: cached, or in decoding for another request",
    "decoded_cache_misses": "images that were decoded",
    "decoded_cache_evictions": "cached decoded images evicted for lack of room",
    "decoded_cache_expired": "cached decoded images that expired",
    "response_store_hits": "requests that named a kept answer",
    "response_store_misses": "requests that named an answer which is not kept",
    "response_store_evictions": "kept answers evicted for lack of room",
    "response_store_expired": "kept answers that expired",
    "image_store_hits": "images of requests that were named by the id of an upload",
    "image_store_misses": "ids that name no stored upload",
    "image_store_evictions": "uploaded images evicted for lack of room",
    "image_store_expired": "uploaded images that expired",
    "images_encoded": "images that the vision encoder encoded",
    "encoder_engine_hits": "encoded images for whose grid a built encoder was used",
    "encoder_engine_misses": "encoded images without a built encoder for their grid",
    "encode_seconds": "seconds in the vision encoder, projector included",
    "engine_steps": "steps of the engine",
    "computed_tokens": "tokens computed, prompts and answers",
    "generation_tokens": "tokens generated",
    "preemptions": "sequences that lost their blocks and were recomputed",
    "kv_dropped_tokens": "tokens whose keys and values were left out (kv_keep)",
    "integrity_errors": "failed consistency checks of the caches; anything but 0 is a defect",
}
DRAFTERS = ("grammar", "prompt", "hints", "answers", "layer", "model")
"""Sources of drafts: the answer's format, and the drafters of the setting `speculate`."""
DRAFT_PLACES = 16
"""Drafts are counted by their place among those of a step up to this one. Later ones are rare."""
LABELLED = {
    "drafter_tokens": Labelled("drafts that were computed, by their source", "drafter", DRAFTERS),
    "drafter_accepted_tokens": Labelled(
        "drafts that became part of an answer, by their source", "drafter", DRAFTERS
    ),
    "accepted_draft_tokens_per_position": Labelled(
        "drafts that became part of an answer, by their place among those of a step, which begins with 0",
        "position",
        tuple(map(str, range(DRAFT_PLACES))),
    ),
}


def labelled_key(name: str, value: str | int) -> str:
    """Return the name of the figure for one label value of a counter in LABELLED."""
    return f"{name}:{value}"


RATES = {
    "encoder_images_per_second": Rate("images encoded per second", "images_encoded"),
    "encoder_busy_share": Rate("share of time in which the vision encoder computed", "encode_seconds"),
}
SHARES = {
    "kv_usage": Share("used share of the KV blocks in the pool", "kv_blocks_used", "kv_blocks_total"),
    "kv_host_usage": Share(
        "used share of the KV blocks of host memory", "kv_host_blocks", "kv_host_blocks_total"
    ),
}
IMAGE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DISTRIBUTIONS = {
    "image_encode_seconds": Distribution(
        "seconds that the vision encoder spent on an image, projector included", IMAGE_SECONDS
    ),
    "image_project_seconds": Distribution(
        "seconds that the projector spent on an image; not counted if its encoder was built ahead",
        IMAGE_SECONDS,
    ),
    "step_tokens": Distribution("tokens that a step computed, prompts and answers", STEP_TOKENS),
    "step_sequences": Distribution("sequences that shared a step", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
}
FIGURES = frozenset(
    (
        *GAUGES,
        *COUNTERS,
        *(labelled_key(name, value) for name, row in LABELLED.items() for value in row.values),
        *(key for name, row in DISTRIBUTIONS.items() for key in keys_of(name, row.buckets)),
    )
)
"""Names of all figures that an engine and the media caches may report."""
DEVICE_GAUGES = {
    "device_memory_used_bytes": "used memory of a GPU, of all processes",
    "device_memory_total_bytes": "memory of a GPU",
    "device_utilization_share": "share of time in which a GPU ran at least one kernel, says its driver",
    "device_temperature_celsius": "temperature of a GPU",
    "device_power_watts": "electric power that a GPU draws",
}
DEVICE_COUNTERS = {"device_energy_joules": "energy that a GPU has taken since its driver was loaded"}
DEVICE_LABEL = "gpu"


class Total(NamedTuple):
    """A counter that the server increments.

    text: help text.
    labels: names of its labels.
    """

    text: str
    labels: tuple[str, ...] = ()


class Spread(NamedTuple):
    """A histogram.

    text: help text.
    buckets: upper bounds of the buckets.
    label: name of its only label; "" if it has none.
    """

    text: str
    buckets: Buckets
    label: str = ""


# Metrics of relevance realization, with the names of the ARR-COC documents. Prometheus recommends seconds,
# but one of these names says milliseconds.
RELEVANCE_GAUGES = {
    "arr_coc_avg_tokens_per_patch": "visual tokens per region of the last image that was encoded by region",
    "arr_coc_propositional_score": "mean of the propositional map of the last image encoded by region",
    "arr_coc_perspectival_score": "mean of the perspectival map of the last image encoded by region",
    "arr_coc_participatory_score": "mean of the participatory map of the last image encoded by region",
}
TENSION_GAUGE = "arr_coc_opponent_processing_balance"
TENSION_TEXT = "a tension from 0 to 1; 1 is the first side of the pair"
TENSIONS = ("compress_particularize", "exploit_explore", "focus_diversify")
RELEVANCE_SPREADS: dict[str, tuple[str, Buckets]] = {
    "arr_coc_relevance_score_dist": ("relevance of regions", tuple(step / 10 for step in range(1, 11))),
    "arr_coc_token_allocation": ("visual tokens allotted to a region", (0, 16, 64, 128, 200, 256, 400)),
    "arr_coc_lod_allocation_time_ms": (
        "milliseconds in which the relevance of an image was turned into tokens of its regions",
        (0.25, 0.5, 1, 2, 4, 8, 16, 32),
    ),
}
INFO_TEXT = "always 1; the labels name the served model and Fovea's version"
INFO_LABELS = ("model", "version")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
STAGES = ("fetch", "media_decode", "preprocess", "queue", "encode", "prefill", "decode", "detokenize")
TOTALS = {
    "requests": Total("finished HTTP requests", ("route", "status")),
    "answers_begun": Total("requests that were handed to the engine"),
    "refused": Total("requests refused, by error code", ("code",)),
    "denied": Total("requests refused with 401 or 403, by reason", ("reason",)),
    "connections_refused": Total(
        "connections and requests refused before any route, or closed to make room, by reason", ("reason",)
    ),
    "connection_timeouts": Total("connections closed because the client was too slow", ("kind",)),
    "ignored_fields": Total("unknown fields of requests that were ignored"),
    "images": Total("images in requests"),
    "videos": Total("videos in requests"),
    "tokens": Total("tokens by kind; cached and image are parts of prompt", ("kind",)),
    "finished": Total("answers by finish reason; abort: the client left", ("reason",)),
}
SPREADS = {
    "request_seconds": Spread("duration of a request from its first to its last byte", SECONDS, "route"),
    "ttft_seconds": Spread(
        "time from arrival to first token, loading of images included, of every request that got one", SECONDS
    ),
    "itl_seconds": Spread("time between two tokens of an answer", SECONDS),
    "tpot_seconds": Spread("mean time between two tokens of an answer, once per request", SECONDS),
    "answer_seconds": Spread("time from arrival at the engine to the last token", SECONDS),
    "response_seconds": Spread("time from arrival to the last token, loading of images included", SECONDS),
    "inference_seconds": Spread("seconds of prefill and decode of a request", SECONDS),
    "stage_seconds": Spread("seconds per stage of a request", SECONDS, "stage"),
    "prompt_tokens": Spread("tokens of a prompt", TOKENS),
    "computed_prompt_tokens": Spread("tokens of a prompt that were not cached", TOKENS),
    "answer_tokens": Spread("tokens of an answer, all choices", TOKENS),
    "choices": Spread("choices that a request asks for (n)", (1, 2, 5, 10, 20)),
    "max_tokens": Spread("length limit of an answer, if the request sets one", TOKENS),
}
