"""One table of metric names, and a registry that fills it.

Gauges and totals are read from the engine when they are scraped; only what has a distribution is observed as it
happens. Every name starts with `fovea_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fovea.core.types import Delta, StageTimings

Stats = Callable[[], Mapping[str, float]]
Buckets = tuple[float, ...]

GAUGES = {
    "requests_running": "sequences that share the current step",
    "requests_waiting": "sequences that wait for blocks or a turn",
    "requests_waiting_ready": "of these, that need no image encoded first",
    "requests_waiting_image": "of these, that wait for an image to be encoded",
    "oldest_waiting_seconds": "how long the one has waited that waits longest",
    "kv_blocks_total": "KV blocks in the pool",
    "kv_blocks_used": "KV blocks that running sequences hold",
    "kv_blocks_cached": "KV blocks that a prefix could find",
    "kv_block_bytes": "bytes of a KV block",
    "embed_cache_capacity_bytes": "ceiling of encoder outputs kept",
    "embed_cache_bytes": "bytes of encoder outputs kept",
    "embed_cache_entries": "encoder outputs kept",
    "embed_cache_held_bytes": "of these, bytes that requests are waiting for or reading",
    "embed_disk_bytes": "bytes of encoder outputs on disk",
    "embed_disk_entries": "encoder outputs on disk",
    "embed_disk_off": "1 when the disk made trouble and is not used any more",
    "image_store_bytes": "bytes of images that were sent ahead",
    "image_store_entries": "images that were sent ahead",
    "pixel_bytes": "bytes of processed pixels that wait for the encoder",
}
COUNTERS = {
    "prefix_query_tokens": "tokens looked up in the prefix cache",
    "prefix_hit_tokens": "tokens whose KV was found there",
    "embed_cache_hits": "images whose encoder output was found",
    "embed_cache_misses": "images that had to be encoded",
    "failed_steps": "steps that raised; their requests got an error",
    "embed_cache_evictions": "encoder outputs dropped for room",
    "embed_disk_hits": "encoder outputs that were read from disk",
    "embed_disk_misses": "encoder outputs that were looked for on disk and not found",
    "embed_disk_writes": "encoder outputs written to disk",
    "embed_disk_dropped": "encoder outputs not written because the disk was too slow",
    "embed_disk_evictions": "encoder outputs removed from disk for room",
    "embed_disk_corrupt": "files that were damaged and removed",
    "image_store_hits": "images of requests that were named by the id of one sent ahead",
    "image_store_misses": "ids of images that were not here any more",
    "image_store_evictions": "images sent ahead that were dropped for room",
    "images_encoded": "images that the vision encoder ran for",
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
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
STAGES = ("media", "preprocess", "queue", "encode", "prefill", "decode")


class _EngineCollector(Collector):
    def __init__(self, stats: Stats, model: str) -> None:
        self._stats = stats
        self._model = model

    def collect(self) -> Iterator[Metric]:
        values = self._stats()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"fovea:{name}", text, value=values.get(name, 0.0))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"fovea:{name}", text, value=values.get(name, 0.0))
        for alias, name in ALIASES.items():
            family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            metric = family(alias, f"fovea:{name}", labels=["model_name"])
            metric.add_metric([self._model], _share(values) if name == "kv_usage" else values.get(name, 0.0))
            yield metric


def _share(values: Mapping[str, float]) -> float:
    total = values.get("kv_blocks_total", 0.0)
    return values.get("kv_blocks_used", 0.0) / total if total else 0.0


class _Distribution:
    """A histogram under our name and, where there is one, under vLLM's."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model: str,
        name: str,
        text: str,
        aliases: tuple[str, ...],
        buckets: Buckets,
    ) -> None:
        self._own = Histogram(name, text, buckets=buckets, registry=registry)
        self._others = [
            Histogram(alias, name, ["model_name"], buckets=buckets, registry=registry).labels(model)
            for alias in aliases
        ]

    def observe(self, value: float) -> None:
        self._own.observe(value)
        for other in self._others:
            other.observe(value)


class Metrics:
    """One process's registry. `stats` gives the engine's numbers by the names of GAUGES and COUNTERS."""

    def __init__(self, stats: Stats, model: str, version: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats, model))
        r = self.registry
        info = Gauge("fovea:info", "always 1; what runs here", ["model", "version"], registry=r)
        info.labels(model, version).set(1)
        self._requests = Counter("fovea:requests", "finished HTTP requests", ["route", "status"], registry=r)
        self._latency = Histogram(
            "fovea:request_seconds",
            "a request from its first to its last byte",
            ["route"],
            buckets=SECONDS,
            registry=r,
        )

        def distribution(name: str, text: str, buckets: Buckets, *aliases: str) -> _Distribution:
            return _Distribution(r, model, name, text, aliases, buckets)

        self._ttft = distribution(
            "fovea:ttft_seconds",
            "arrival, images included, to first token; of every request that got one",
            SECONDS,
            "vllm:time_to_first_token_seconds",
        )
        self._itl = distribution(
            "fovea:itl_seconds",
            "time between two tokens of an answer",
            SECONDS,
            "vllm:inter_token_latency_seconds",
            "vllm:time_per_output_token_seconds",
        )
        self._whole = distribution(
            "fovea:answer_seconds", "a request's stages together", SECONDS, "vllm:e2e_request_latency_seconds"
        )
        self._vllm_stages = {
            stage: Histogram(
                f"vllm:request_{stage}_time_seconds", f"fovea:stage_seconds of {stage}", ["model_name"],
                buckets=SECONDS, registry=r,
            ).labels(model)
            for stage in ("queue", "prefill", "decode")
        }  # fmt: skip
        self._stage = Histogram(
            "fovea:stage_seconds", "seconds per stage of a request", ["stage"], buckets=SECONDS, registry=r
        )
        self._tokens = Counter(
            "fovea:tokens", "tokens by kind; cached and image are parts of prompt", ["kind"], registry=r
        )
        self._prompt = distribution(
            "fovea:prompt_tokens", "tokens of a prompt", TOKENS, "vllm:request_prompt_tokens"
        )
        self._answer = distribution(
            "fovea:answer_tokens",
            "tokens of an answer, all choices",
            TOKENS,
            "vllm:request_generation_tokens",
        )
        self._vllm_prompt = Counter(
            "vllm:prompt_tokens", "fovea:tokens of kind prompt", ["model_name"], registry=r
        ).labels(model)
        self._vllm_success = Counter(
            "vllm:request_success", "fovea:finished", ["model_name", "finished_reason"], registry=r
        )
        self._model = model
        self._refused = Counter("fovea:refused", "requests refused, by error code", ["code"], registry=r)
        self._images = Counter("fovea:images", "images that requests brought", registry=r)
        self._finish = Counter("fovea:finished", "answers by why they ended", ["reason"], registry=r)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def refused(self, code: str) -> None:
        """A request got an error instead of an answer."""
        self._refused.labels(code).inc()

    def images(self, count: int) -> None:
        self._images.inc(count)

    def gap(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def failed(self) -> None:
        """An answer ended with an error, or nobody read it to its end."""
        self._finish.labels("error").inc()

    def delta(self, delta: Delta) -> None:
        """Count the end of a choice, and with the last one the request's bill."""
        if delta.finish_reason is not None:
            self._finish.labels(delta.finish_reason).inc()
            self._vllm_success.labels(self._model, delta.finish_reason).inc()
        if delta.usage is not None:
            for kind in ("prompt", "completion", "cached", "image"):
                self._tokens.labels(kind).inc(getattr(delta.usage, kind))
            self._prompt.observe(delta.usage.prompt)
            self._answer.observe(delta.usage.completion)
            self._vllm_prompt.inc(delta.usage.prompt)
        if delta.timings is not None:
            self._timings(delta.timings)

    def _timings(self, timings: StageTimings) -> None:
        for stage in STAGES:
            self._stage.labels(stage).observe(getattr(timings, stage))
        for stage, histogram in self._vllm_stages.items():
            histogram.observe(getattr(timings, stage))
        self._whole.observe(timings.ttft + timings.decode)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
