"""The Prometheus registry of a server, with the metrics that `observe.table` lists.

Gauges and counters of the engine and the caches are read when they are scraped. Counts and distributions of
requests are recorded as they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fovea.core.types import Delta, StageTimings, Usage
from fovea.observe.relevance import RelevanceMetrics
from fovea.observe.table import ALIASES, COUNTERS, GAUGES, SPREADS, STAGES, TOTALS, Spread, Total

Stats = Callable[[], Mapping[str, float]]


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


class _Total:
    def __init__(self, registry: CollectorRegistry, model: str, name: str, row: Total) -> None:
        self._fixed = (model,) if name.startswith("vllm:") else ()
        labels = ("model_name",) * len(self._fixed) + row.labels
        self._counter = Counter(name, row.text, labels, registry=registry)

    def add(self, count: float, *labels: str) -> None:
        values = self._fixed + labels
        (self._counter.labels(*values) if values else self._counter).inc(count)


class _Spread:
    """A histogram under Fovea's name and, if there are any, under vLLM's names."""

    def __init__(self, registry: CollectorRegistry, model: str, name: str, row: Spread) -> None:
        labels = (row.label,) if row.label else ()
        self._own = Histogram(f"fovea:{name}", row.text, labels, buckets=row.buckets, registry=registry)
        self._others: dict[str, list[Histogram]] = {}
        for value, alias in row.aliases:
            text = f"fovea:{name} of {value}" if value else f"fovea:{name}"
            other = Histogram(alias, text, ["model_name"], buckets=row.buckets, registry=registry)
            self._others.setdefault(value, []).append(other.labels(model))

    def observe(self, value: float, label: str = "") -> None:
        (self._own.labels(label) if label else self._own).observe(value)
        for other in self._others.get(label, ()):
            other.observe(value)


class Metrics:
    """The metrics of one server.

    stats: returns the values of GAUGES and COUNTERS by name; a missing value counts as 0.
    """

    def __init__(self, stats: Stats, model: str, version: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats, model))
        text = "always 1; the labels name the served model and Fovea's version"
        info = Gauge("fovea:info", text, ["model", "version"], registry=self.registry)
        info.labels(model, version).set(1)
        self._totals = {name: _Total(self.registry, model, name, row) for name, row in TOTALS.items()}
        self._spreads = {name: _Spread(self.registry, model, name, row) for name, row in SPREADS.items()}
        self._relevance = RelevanceMetrics(self.registry)

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        self._count("requests", 1, route, str(status))
        self._spreads["request_seconds"].observe(seconds, route)

    def count_refusal(self, code: str) -> None:
        """Count a request that got an error instead of an answer."""
        self._count("refused", 1, code)

    def count_denial(self, reason: str) -> None:
        """Count a response with status 401 or 403. reason: code of the error."""
        self._count("denied", 1, reason)

    def count_refused_connection(self, reason: str) -> None:
        """Count a connection or request that was refused before any route saw it."""
        self._count("connections_refused", 1, reason)

    def count_connection_timeout(self, kind: str) -> None:
        """Count a connection that the server closed because its client was too slow."""
        self._count("connection_timeouts", 1, kind)

    def count_images(self, count: int) -> None:
        self._count("images", count)

    def count_videos(self, count: int) -> None:
        self._count("videos", count)

    def count_ignored_fields(self, count: int) -> None:
        """Count fields of a request that are not known and were ignored."""
        self._count("ignored_fields", count)

    def observe_gap(self, seconds: float) -> None:
        self._spreads["itl_seconds"].observe(seconds)

    def observe_first_token(self, seconds: float) -> None:
        self._spreads["ttft_seconds"].observe(seconds)

    def count_failure(self) -> None:
        """Count an answer that ended with an error, or that the client did not read to its end."""
        self._count("finished", 1, "error")

    def observe_delta(self, delta: Delta) -> None:
        """Count the end of a choice, and with the last delta of a request its tokens and timings."""
        if delta.finish_reason is not None:
            self._count("finished", 1, delta.finish_reason)
            self._totals["vllm:request_success"].add(1, delta.finish_reason)
        if delta.usage is not None:
            self._observe_usage(delta.usage)
        if delta.timings is not None:
            self._observe_timings(delta.timings)
        for image in delta.images:
            if image.record is not None:
                self._relevance.observe(image.record)

    def _observe_usage(self, usage: Usage) -> None:
        for kind in ("prompt", "completion", "cached", "image"):
            self._count("tokens", getattr(usage, kind), kind)
        self._totals["vllm:prompt_tokens"].add(usage.prompt)
        self._spreads["prompt_tokens"].observe(usage.prompt)
        self._spreads["answer_tokens"].observe(usage.completion)

    def _observe_timings(self, timings: StageTimings) -> None:
        for stage in STAGES:
            self._spreads["stage_seconds"].observe(getattr(timings, stage), stage)
        self._spreads["answer_seconds"].observe(timings.ttft + timings.decode)

    def _count(self, name: str, by: float, *labels: str) -> None:
        self._totals[f"fovea:{name}"].add(by, *labels)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
