"""The metrics of a gateway.

Counts and times are added as requests end; gauges of backends and stores are read when they are scraped. With
several workers, prometheus_client keeps the numbers of each in a file (PROMETHEUS_MULTIPROC_DIR), and every
worker can answer for all. Labels are bounded: beyond MOST_NAMES, names of tenants, models and error codes are
"other", and so are names of backends beyond MOST_BACKENDS. A metric of several labels has at most MOST_SERIES
and MOST_REST series, however many combinations occur.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from fovea.observe.exposition import OTHER, Exposition, ProcessMetrics, expose, workers

MOST_NAMES = 100
MOST_BACKENDS = 1000
MOST_SERIES = 2000
"""Series of a metric that have names of their own. In further ones, the names are "other"."""
MOST_REST = 500
"""Series of a metric with such names. In further ones, all labels are "other"."""
MOST_GAUGES = 5000
"""Most series of all gauges together."""
MOST_CHILDREN = 20_000
"""Most label values, as they come in, whose series are found without bounding them again."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PREFIX = "fovea_gateway_"
_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


class Row(NamedTuple):
    """One metric: its help text and its labels."""

    text: str
    labels: tuple[str, ...] = ()


COUNTERS: Mapping[str, Row] = {
    "requests": Row("requests for answers", ("api", "model", "tenant", "status")),
    "attempts": Row("requests sent to backends", ("backend", "outcome")),
    "retries": Row("further attempts: retry, hedge, fallback", ("kind",)),
    "routes": Row("choices of backends by reason", ("reason",)),
    "breaker_opened": Row("times that a circuit breaker has opened", ("backend", "stage")),
    "ejections": Row("ejections of slow backends", ("backend",)),
    "tokens": Row("tokens by kind: prompt, visual, cached, completion", ("tenant", "kind")),
    "cost": Row("money in units of the price table's currency", ("tenant",)),
    "images": Row("images and videos inspected"),
    "refused": Row("requests refused by the gateway, by the error's code", ("code",)),
    "degraded": Row("requests whose images were asked for with fewer visual tokens"),
    "cache": Row("requests by their use of the response cache: hit, miss, stale, bypass", ("result",)),
    "experiment_requests": Row(
        "outcomes of requests in an experiment, without copies: answered, failed",
        ("experiment", "variant", "outcome"),
    ),
    "connections_refused": Row("connections refused before any route saw them", ("reason",)),
    "connection_timeouts": Row("connections closed because the client was too slow", ("kind",)),
}
HISTOGRAMS: Mapping[str, Row] = {
    "request_seconds": Row("duration of a request", ("model",)),
    "first_byte_seconds": Row("time from sending to a backend's first byte", ("backend",)),
    "waiting_seconds": Row("time in the fair queue", ("model",)),
}
GAUGES: Mapping[str, Row] = {
    "backend_up": Row("1 if a backend gets requests, 0 if not", ("backend",)),
    "backend_requests": Row("outstanding requests of a backend", ("backend",)),
    "backend_images_held": Row(
        "images that a backend's caches hold, by its own events; missing while they are not known",
        ("backend",),
    ),
    "backend_tokens": Row("outstanding tokens of a backend", ("backend", "kind")),
    "breaker_open": Row(
        "1 if the circuit breaker of a backend's stage is open, or lets single requests through as a test",
        ("backend", "stage"),
    ),
    "response_cache": Row("figures of the response cache by name", ("name",)),
    "traces": Row(
        "figures of the export of traces by name: trace_spans_exported, trace_spans_dropped, traces_waiting",
        ("name",),
    ),
    "accounts": Row(
        "figures of the accounts of tenants by name: failures, fallbacks, pending, ...", ("name",)
    ),
    "queued": Row("requests that wait for a backend", ("model",)),
}


TOTALS = (
    "answered", "refused", "failed", "retries", "cache_hits", "prompt_tokens", "visual_tokens",
    "completion_tokens", "cost", "request_seconds", "request_count", "waiting_seconds", "waiting_count",
)  # fmt: skip
"""Names of the sums of `Metrics.totals`."""


def _total_of(sample: str, labels: Mapping[str, str]) -> str:
    """Return the sum to which a sample belongs; "": to none. sample: its name without the prefix."""
    match sample:
        case "requests_total":
            status = labels["status"]
            return "answered" if status < "400" else "failed" if status >= "500" else "refused"
        case "tokens_total":
            return f"{labels['kind']}_tokens"
        case "cache_total":
            return "cache_hits" if labels["result"] == "hit" else ""
        case "retries_total" | "cost_total":
            return sample.removesuffix("_total")
    for name in ("request_seconds", "waiting_seconds"):
        if sample in (f"{name}_sum", f"{name}_count"):
            return name if sample.endswith("_sum") else f"{name.removesuffix('_seconds')}_count"
    return ""


class Names:
    """Bounds the values of a label: the first MOST_NAMES stay, further ones are "other"."""

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(name)
        return name


class _AllWorkers(Collector):
    """The sums over all workers. A metric that no worker has counted yet has no series, but is named.

    own: the metrics of this worker.
    """

    def __init__(self, own: CollectorRegistry) -> None:
        self._own = own

    def collect(self) -> Iterator[Metric]:
        summed = list(MultiProcessCollector(CollectorRegistry()).collect())  # type: ignore[no-untyped-call]
        yield from summed
        names = {family.name for family in summed}
        for family in self._own.collect():
            if family.name not in names:
                yield Metric(family.name, family.documentation, family.type)


class Metrics:
    """The metrics of one worker.

    tenants, models: bound the labels of these names.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tenants = Names()
        self.models = Names()
        self._counters = {
            name: Counter(PREFIX + name, row.text, row.labels, registry=self.registry)
            for name, row in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, row.text, row.labels, buckets=_SECONDS, registry=self.registry)
            for name, row in HISTOGRAMS.items()
        }
        self._gauges = {
            name: Gauge(
                PREFIX + name,
                row.text,
                row.labels,
                registry=self.registry,
                multiprocess_mode="livemin" if name == "backend_up" else "livesum",
            )
            for name, row in GAUGES.items()
        }
        self._names = {
            "backend": Names(MOST_BACKENDS),
            "tenant": self.tenants,
            "model": self.models,
            "code": Names(),
        }
        self._series: dict[str, set[tuple[str, ...]]] = {name: set() for name in (*COUNTERS, *HISTOGRAMS)}
        self._children: dict[tuple[str, ...], Counter | Histogram] = {}
        self._shown: set[tuple[str, ...]] = set()
        self._fresh: set[tuple[str, ...]] = set()
        self.refresh: Callable[[Metrics], None] = lambda metrics: None
        if _DIRECTORY not in os.environ:
            self.registry.register(ProcessMetrics())

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add to a counter of COUNTERS."""
        key = (name, *labels)
        child = self._children.get(key)
        if child is None:
            parent = self._counters[name]
            bounded = self._bounded(name, COUNTERS[name], labels)
            child = self._children[key] = parent.labels(*bounded) if labels else parent
        assert isinstance(child, Counter)
        child.inc(by)

    def observe(self, name: str, seconds: float, *labels: str, trace_id: str = "") -> None:
        """Add a duration to a histogram of HISTOGRAMS.

        trace_id: of the request, if its trace is recorded; it becomes an exemplar. With several workers there
        are not exemplars.
        """
        key = (name, *labels)
        child = self._children.get(key)
        if child is None:
            bounded = self._bounded(name, HISTOGRAMS[name], labels)
            child = self._children[key] = self._histograms[name].labels(*bounded)
        assert isinstance(child, Histogram)
        child.observe(seconds, {"trace_id": trace_id} if trace_id else None)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge of GAUGES. Within one refresh, values with the same labels add up.

        Beyond MOST_GAUGES series of all gauges together, further ones are not shown.
        """
        key = (name, *labels)
        if key in self._fresh:
            self._gauges[name].labels(*labels).inc(value)
        elif len(self._fresh) < MOST_GAUGES:
            self._gauges[name].labels(*labels).set(value)
            self._fresh.add(key)

    def _bounded(self, name: str, row: Row, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return labels with bounded names, which come and go for months, in a bounded number of series."""
        if len(self._children) > MOST_CHILDREN:
            self._children.clear()
        known, names = self._series[name], self._names
        pairs = tuple(zip(row.labels, labels, strict=True))
        values = tuple(names[label](value) if label in names else value for label, value in pairs)
        if values not in known and len(known) >= MOST_SERIES:
            values = tuple(OTHER if label in names else value for label, value in pairs)
            if values not in known and len(known) >= MOST_SERIES + MOST_REST:
                return (OTHER,) * len(values)
        known.add(values)
        return values

    def _refresh(self) -> None:
        """Set all gauges, and drop those of backends and queues that are gone."""
        self._fresh = set()
        self.refresh(self)
        for name, *labels in self._shown - self._fresh:
            self._gauges[name].labels(*labels).set(0)
            if _DIRECTORY not in os.environ:  # files of several workers cannot be cut
                self._gauges[name].remove(*labels)
        self._shown = self._fresh

    def count_refused_connection(self, reason: str) -> None:
        """Count a connection that was refused before any route saw it."""
        self.count("connections_refused", reason)

    def count_connection_timeout(self, kind: str) -> None:
        """Count a connection that was closed because its client was too slow."""
        self.count("connection_timeouts", kind)

    def totals(self) -> dict[str, float]:
        """Return sums of all workers since they began, for the page of operators.

        answered, refused, failed: requests by status. The others are counters, and sums and counts of times.
        """
        collector: Collector = self.registry
        if _DIRECTORY in os.environ:
            collector = MultiProcessCollector(CollectorRegistry())  # type: ignore[no-untyped-call]
        found: dict[str, float] = dict.fromkeys(TOTALS, 0.0)
        for family in collector.collect():
            for sample in family.samples:
                name = _total_of(sample.name.removeprefix(PREFIX), sample.labels)
                if name in found:
                    found[name] += sample.value
        return found

    def exposition(self, accept: str = "") -> Exposition:
        """Return the metrics of all workers as the text of a scrape. accept: the request's Accept header."""
        self._refresh()
        if _DIRECTORY not in os.environ:
            return expose(self.registry, accept)
        registry = CollectorRegistry()
        registry.register(_AllWorkers(self.registry))
        registry.register(ProcessMetrics(lambda: workers(Path(os.environ[_DIRECTORY]))))
        return expose(registry, accept)
