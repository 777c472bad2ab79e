"""The metrics of a gateway.

Counts and times are added as requests end; gauges of backends and stores are read when they are scraped. With
several workers, prometheus_client keeps the numbers of each in a file (PROMETHEUS_MULTIPROC_DIR), and every
worker can answer for all. Labels are bounded: beyond MOST_NAMES, names of tenants and models are "other", and
so are names of backends beyond MOST_BACKENDS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

MOST_NAMES = 100
MOST_BACKENDS = 1000
MOST_CHILDREN = 20_000
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PREFIX = "fovea_gateway_"


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
    "backend_tokens": Row("outstanding tokens of a backend", ("backend", "kind")),
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


class Names:
    """Bounds the values of a label: the first MOST_NAMES stay, further ones are "other"."""

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= self._most:
            return "other"
        self._known.add(name)
        return name


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
        self._backends = Names(MOST_BACKENDS)
        self._children: dict[tuple[str, ...], Counter | Histogram] = {}
        self._shown: set[tuple[str, ...]] = set()
        self._fresh: set[tuple[str, ...]] = set()
        self.refresh: Callable[[Metrics], None] = lambda metrics: None

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add to a counter of COUNTERS."""
        key = (name, *labels)
        child = self._children.get(key)
        if child is None:
            parent = self._counters[name]
            bounded = self._bounded(COUNTERS[name], labels)
            child = self._children[key] = parent.labels(*bounded) if labels else parent
        assert isinstance(child, Counter)
        child.inc(by)

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """Add a duration to a histogram of HISTOGRAMS."""
        key = (name, *labels)
        child = self._children.get(key)
        if child is None:
            bounded = self._bounded(HISTOGRAMS[name], labels)
            child = self._children[key] = self._histograms[name].labels(*bounded)
        assert isinstance(child, Histogram)
        child.observe(seconds)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge of GAUGES."""
        self._gauges[name].labels(*labels).set(value)
        self._fresh.add((name, *labels))

    def _bounded(self, row: Row, labels: tuple[str, ...]) -> list[str]:
        """Return labels with bounded names of backends, which come and go for months."""
        if len(self._children) > MOST_CHILDREN:
            self._children.clear()
        pairs = zip(row.labels, labels, strict=True)
        return [self._backends(value) if name == "backend" else value for name, value in pairs]

    def _refresh(self) -> None:
        """Set all gauges, and drop those of backends and queues that are gone."""
        self._fresh = set()
        self.refresh(self)
        for name, *labels in self._shown - self._fresh:
            self._gauges[name].labels(*labels).set(0)
            if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:  # files of several workers cannot be cut
                self._gauges[name].remove(*labels)
        self._shown = self._fresh

    def count_refused_connection(self, reason: str) -> None:
        """Count a connection that was refused before any route saw it."""
        self.count("connections_refused", reason)

    def count_connection_timeout(self, kind: str) -> None:
        """Count a connection that was closed because its client was too slow."""
        self.count("connection_timeouts", kind)

    def exposition(self) -> bytes:
        """The metrics of all workers, in the text format of Prometheus."""
        self._refresh()
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
