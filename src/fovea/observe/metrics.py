"""The Prometheus registry of a server, with the metrics that the tables of this package list.

Gauges and counters of the engine and the caches are read when they are scraped. Counts and distributions of
requests are recorded as they happen, once each: names of other systems are copied at the scrape.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from fovea.core.types import Delta, StageTimings, Usage
from fovea.observe.alias_copy import copy_under_alias
from fovea.observe.aliases import ALIASES
from fovea.observe.bounded import BoundedSeries
from fovea.observe.device import Devices
from fovea.observe.engine_collector import EngineCollector, Stats
from fovea.observe.exposition import Exposition, expose
from fovea.observe.process import ProcessMetrics
from fovea.observe.relevance import RelevanceMetrics
from fovea.observe.request_table import INFO_LABELS, INFO_TEXT, SPREADS, STAGES, TOTALS, Spread, Total

MOST_SERIES = 500
"""Most series of a counter that have label values of their own; the values of further ones are "other"."""
MOST_HISTOGRAMS = 100
"""Most series of a histogram with label values of their own. It is lower: each has a series per bucket."""


class _Total:
    """A counter of TOTALS."""

    def __init__(self, name: str, row: Total) -> None:
        self.metric = Counter(f"fovea:{name}", row.text, row.labels, registry=None)
        self._series = BoundedSeries(self.metric, len(row.labels), MOST_SERIES)

    def add(self, count: float, *labels: str) -> None:
        self._series[labels].inc(count)


class _Spread:
    """A histogram of SPREADS."""

    def __init__(self, name: str, row: Spread) -> None:
        labels = (row.label,) if row.label else ()
        self.metric = Histogram(f"fovea:{name}", row.text, labels, buckets=row.buckets, registry=None)
        self._series = BoundedSeries(self.metric, len(labels), MOST_HISTOGRAMS)

    def observe(self, value: float, *labels: str, trace_id: str = "") -> None:
        """Record a value.

        trace_id: of the request, if its trace is recorded; it becomes an exemplar.
        """
        if trace_id:
            self._series[labels].observe(value, {"trace_id": trace_id})
        else:
            self._series[labels].observe(value)


class _Collector(Collector):
    """All metrics, and their copies under the names of other systems.

    parts: yield the metrics with their own names.
    model: the served model's name.
    """

    def __init__(self, parts: Iterable[Callable[[], Iterable[Metric]]], model: str) -> None:
        self._parts = tuple(parts)
        self._model = model

    def collect(self) -> Iterator[Metric]:
        families = [family for part in self._parts for family in part()]
        yield from families
        by_name = {family.name.removeprefix("fovea:"): family for family in families}
        for alias in ALIASES:
            if alias.of in by_name:
                yield copy_under_alias(by_name[alias.of], alias, self._model)


class Metrics:
    """The metrics of one server.

    The argument `trace_id` of a method is the trace id of the request if its trace is recorded; it becomes an
    exemplar. "": there is none.
    """

    def __init__(
        self,
        stats: Stats,
        model: str,
        version: str,
        devices: Devices | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """stats: returns the figures by the names of `observe.table`; a missing one counts as 0.

        model: the served model's name.
        devices: the GPUs of the machine; None: no metrics of GPUs.
        clock: returns seconds.
        """
        self.registry = CollectorRegistry()
        info = Gauge("fovea:info", INFO_TEXT, INFO_LABELS, registry=self.registry)
        info.labels(model, version).set(1)
        self._totals = {name: _Total(name, row) for name, row in TOTALS.items()}
        self._spreads = {name: _Spread(name, row) for name, row in SPREADS.items()}
        parts = (
            EngineCollector(stats, model, clock).collect,
            *(() if devices is None else (devices.collect,)),
            *(total.metric.collect for total in self._totals.values()),
            *(spread.metric.collect for spread in self._spreads.values()),
        )
        self.registry.register(_Collector(parts, model))
        self.registry.register(ProcessMetrics())
        self._relevance = RelevanceMetrics(self.registry)
        self._devices = devices

    def observe_request(self, route: str, status: int, seconds: float, trace_id: str = "") -> None:
        self._count("requests", 1, route, str(status))
        self._spreads["request_seconds"].observe(seconds, route, trace_id=trace_id)

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

    def begin_answer(self, choices: int, max_tokens: int | None) -> None:
        """Count a request that is handed to the engine. max_tokens: None: the request sets no limit."""
        self._count("answers_begun", 1)
        self._spreads["choices"].observe(choices)
        if max_tokens is not None:
            self._spreads["max_tokens"].observe(max_tokens)

    def observe_gap(self, seconds: float) -> None:
        self._spreads["itl_seconds"].observe(seconds)

    def observe_first_token(self, seconds: float, trace_id: str = "") -> None:
        self._spreads["ttft_seconds"].observe(seconds, trace_id=trace_id)

    def count_cut(self, reason: str, used: Usage | None) -> None:
        """Count an answer that did not reach its end.

        reason: "error", or "abort" if its client left. used: its tokens; None: it has used none.
        """
        self._count("finished", 1, reason)
        if used is not None:
            self._count_tokens(used)

    def observe_delta(self, delta: Delta, choices: int = 1, trace_id: str = "") -> None:
        """Count the end of a choice, and with the last delta of a request its tokens and timings.

        choices: choices of the request.
        """
        if delta.finish_reason is not None:
            self._count("finished", 1, delta.finish_reason)
        if delta.usage is not None:
            self._observe_usage(delta.usage)
        if delta.timings is not None:
            self._observe_timings(delta.timings, trace_id)
        if delta.usage is not None and delta.timings is not None:
            self._observe_pace(delta.usage.completion - choices, choices, delta.timings.decode)
        for image in delta.images:
            if image.record is not None:
                self._relevance.observe(image.record)

    def _observe_usage(self, usage: Usage) -> None:
        self._count_tokens(usage)
        self._spreads["prompt_tokens"].observe(usage.prompt)
        self._spreads["computed_prompt_tokens"].observe(usage.prompt - usage.cached)
        self._spreads["answer_tokens"].observe(usage.completion)

    def _count_tokens(self, usage: Usage) -> None:
        for kind in ("prompt", "completion", "cached", "image"):
            self._count("tokens", getattr(usage, kind), kind)

    def _observe_timings(self, timings: StageTimings, trace_id: str) -> None:
        for stage in STAGES:
            self._spreads["stage_seconds"].observe(getattr(timings, stage), stage, trace_id=trace_id)
        engine_s = timings.ttft + timings.decode
        self._spreads["answer_seconds"].observe(engine_s)
        self._spreads["response_seconds"].observe(timings.fetch + timings.media_decode + engine_s)
        self._spreads["inference_seconds"].observe(timings.prefill + timings.decode)

    def _observe_pace(self, gaps: int, choices: int, decode_s: float) -> None:
        """Record the mean time between two tokens of a request. gaps: between tokens of the same choice."""
        if gaps > 0:
            self._spreads["tpot_seconds"].observe(decode_s * choices / gaps)

    def _count(self, name: str, by: float, *labels: str) -> None:
        self._totals[name].add(by, *labels)

    async def refresh(self) -> None:
        """Read the GPUs again if their last reading is old, in a thread, because that may block."""
        if self._devices is not None and self._devices.stale:
            await asyncio.to_thread(self._devices.read)

    def exposition(self, accept: str = "") -> Exposition:
        """Return the text of a scrape. accept: the request's Accept header."""
        return expose(self.registry, accept)
