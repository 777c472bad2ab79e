"""The Prometheus registry of a server, with the metrics that the tables of this package list.

Gauges and counters of the engine and the caches are read when they are scraped. Counts and distributions of
requests are recorded as they happen, once each: names of other systems are copied at the scrape.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from fovea.core.measure import bucket_key, sum_key
from fovea.core.media import RelevanceRecord
from fovea.core.types import Delta, StageTimings, Usage
from fovea.observe.aliases import ALIASES, CACHE_CONFIG, CACHE_CONFIG_LABELS, CACHE_CONFIG_TEXT, ENGINE, Alias
from fovea.observe.device import Devices
from fovea.observe.exposition import BoundedSeries, Exposition, ProcessMetrics, expose
from fovea.observe.table import (
    COUNTERS,
    DISTRIBUTIONS,
    GAUGES,
    INFO_LABELS,
    INFO_TEXT,
    LABELLED,
    RATES,
    RELEVANCE_GAUGES,
    RELEVANCE_SPREADS,
    SHARES,
    SPREADS,
    STAGES,
    TENSION_GAUGE,
    TENSION_TEXT,
    TENSIONS,
    TOTALS,
    Distribution,
    Share,
    Spread,
    labelled_key,
)

Stats = Callable[[], Mapping[str, float]]
WINDOW_S = 60.0
SPACING_S = 1.0
"""Least distance of two samples, so that frequent scrapes do not make the window large."""
MOST_SERIES = 500
"""Most series of a counter that have label values of their own; the values of further ones are "other"."""
MOST_HISTOGRAMS = 100
"""Most series of a histogram with label values of their own. It is lower: each has a series per bucket."""


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
        self._totals = {
            name: BoundedSeries(
                Counter(f"fovea:{name}", row.text, row.labels, registry=None), len(row.labels), MOST_SERIES
            )
            for name, row in TOTALS.items()
        }
        self._spreads = {name: _spread(name, row) for name, row in SPREADS.items()}
        parts = (
            EngineCollector(stats, model, clock).collect,
            *(() if devices is None else (devices.collect,)),
            *(series.parent.collect for series in self._totals.values()),
            *(series.parent.collect for series in self._spreads.values()),
        )
        self.registry.register(_Collector(parts, model))
        self.registry.register(ProcessMetrics())
        self._relevance = RelevanceMetrics(self.registry)
        self._devices = devices

    def observe_request(self, route: str, status: int, seconds: float, trace_id: str = "") -> None:
        self._count("requests", 1, route, str(status))
        self._observe("request_seconds", seconds, route, trace_id=trace_id)

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
        self._observe("choices", choices)
        if max_tokens is not None:
            self._observe("max_tokens", max_tokens)

    def observe_gap(self, seconds: float) -> None:
        self._observe("itl_seconds", seconds)

    def observe_first_token(self, seconds: float, trace_id: str = "") -> None:
        self._observe("ttft_seconds", seconds, trace_id=trace_id)

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
            self._observe_tpot(delta.usage.completion - choices, choices, delta.timings.decode)
        for image in delta.images:
            if image.record is not None:
                self._relevance.observe(image.record)

    def _observe_usage(self, usage: Usage) -> None:
        self._count_tokens(usage)
        self._observe("prompt_tokens", usage.prompt)
        self._observe("computed_prompt_tokens", usage.prompt - usage.cached)
        self._observe("answer_tokens", usage.completion)

    def _count_tokens(self, usage: Usage) -> None:
        for kind in ("prompt", "completion", "cached", "image"):
            self._count("tokens", getattr(usage, kind), kind)

    def _observe_timings(self, timings: StageTimings, trace_id: str) -> None:
        for stage in STAGES:
            self._observe("stage_seconds", getattr(timings, stage), stage, trace_id=trace_id)
        engine_s = timings.ttft + timings.decode
        self._observe("answer_seconds", engine_s)
        self._observe("response_seconds", timings.fetch + timings.media_decode + engine_s)
        self._observe("inference_seconds", timings.prefill + timings.decode)

    def _observe_tpot(self, gaps: int, choices: int, decode_s: float) -> None:
        """Record the mean time between two tokens of a request. gaps: between tokens of the same choice."""
        if gaps > 0:
            self._observe("tpot_seconds", decode_s * choices / gaps)

    def _count(self, name: str, by: float, *labels: str) -> None:
        self._totals[name][labels].inc(by)

    def _observe(self, name: str, value: float, *labels: str, trace_id: str = "") -> None:
        self._spreads[name][labels].observe(value, {"trace_id": trace_id} if trace_id else None)

    async def refresh(self) -> None:
        """Read the GPUs again if their last reading is old, in a thread, because that may block."""
        if self._devices is not None and self._devices.stale:
            await asyncio.to_thread(self._devices.read)

    def exposition(self, accept: str = "") -> Exposition:
        """Return the text of a scrape. accept: the request's Accept header."""
        return expose(self.registry, accept)


def _spread(name: str, row: Spread) -> BoundedSeries[Histogram]:
    labels = (row.label,) if row.label else ()
    histogram = Histogram(f"fovea:{name}", row.text, labels, buckets=row.buckets, registry=None)
    return BoundedSeries(histogram, len(labels), MOST_HISTOGRAMS)


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


class EngineCollector(Collector):
    """The metrics that are read when they are scraped.

    stats: returns the figures by the names of `observe.table`; a missing one counts as 0.
    model: the served model's name.
    clock: returns seconds.
    """

    def __init__(self, stats: Stats, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._model = model
        self._clock = clock
        self._windows = {name: RateWindow(clock()) for name in RATES}

    def collect(self) -> Iterator[Metric]:
        values = self._stats()
        now = self._clock()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"fovea:{name}", text, value=values.get(name, 0.0))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"fovea:{name}", text, value=values.get(name, 0.0))
        for name, labelled in LABELLED.items():
            family = CounterMetricFamily(f"fovea:{name}", labelled.text, labels=(labelled.label,))
            for value in labelled.values:
                family.add_metric((value,), values.get(labelled_key(name, value), 0.0))
            yield family
        for name, rate in RATES.items():
            growth = self._windows[name].rate(now, values.get(rate.counter, 0.0))
            yield GaugeMetricFamily(f"fovea:{name}", rate.text, value=growth)
        for name, share in SHARES.items():
            yield GaugeMetricFamily(f"fovea:{name}", share.text, value=_share(share, values))
        for name, row in DISTRIBUTIONS.items():
            yield _histogram(name, row, values)
        if values.get("kv_blocks_total"):
            yield self._cache_config(values)

    def _cache_config(self, values: Mapping[str, float]) -> Metric:
        labels = {label: f"{values.get(name, 0):.0f}" for label, name in CACHE_CONFIG_LABELS.items()}
        labels |= {"model_name": self._model, "engine": ENGINE}
        family = GaugeMetricFamily(CACHE_CONFIG, CACHE_CONFIG_TEXT, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), 1)
        return family


def _share(row: Share, values: Mapping[str, float]) -> float:
    whole = values.get(row.whole, 0.0)
    return values.get(row.part, 0.0) / whole if whole else 0.0


def _histogram(name: str, row: Distribution, values: Mapping[str, float]) -> Metric:
    buckets = [
        (bound_text(upper), values.get(bucket_key(name, upper), 0.0)) for upper in (*row.buckets, math.inf)
    ]
    return HistogramMetricFamily(
        f"fovea:{name}", row.text, buckets=buckets, sum_value=values.get(sum_key(name), 0.0)
    )


class RateWindow:
    """Samples of one counter. They are taken when the metrics are scraped, by however many scrapers.

    start: time of the first sample, at which the counter was 0.
    """

    def __init__(self, start: float) -> None:
        self._samples: deque[tuple[float, float]] = deque([(start, 0.0)])

    def rate(self, now: float, value: float) -> float:
        """Return the growth per second since the oldest sample of the window, which may be a little older."""
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        if now - self._samples[-1][0] >= SPACING_S:
            self._samples.append((now, value))
        return max(0.0, value - before) / (now - since) if now > since else 0.0


def copy_under_alias(family: Metric, alias: Alias, model: str) -> Metric:
    """Return a copy of a metric under another name, with the labels and the unit of that name.

    model: the served model's name.
    """
    copy = Metric(alias.name, f"{family.name}{_difference(alias)}", family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        labels = _labels(sample, alias)
        if labels is None or suffix == "_created":
            continue
        if alias.of_model:
            labels |= {"model_name": model, "engine": ENGINE}
        counts = suffix in ("_bucket", "_count")
        copy.add_sample(alias.name + suffix, labels, sample.value * (1 if counts else alias.scale))
    return copy


def bound_text(upper: float) -> str:
    """Write the upper bound of a bucket as Prometheus does."""
    return str(floatToGoString(upper))  # type: ignore[no-untyped-call]


def _labels(sample: Sample, alias: Alias) -> dict[str, str] | None:
    """The labels of the copy of a sample; None if the copy does not hold the sample."""
    labels = dict(sample.labels)
    upper = labels.pop("le", None)
    if alias.value:
        if alias.value not in labels.values():
            return None
        labels = {}
    elif alias.label:
        labels = dict.fromkeys((alias.label,), next(iter(labels.values())))
    if upper is not None:
        labels["le"] = bound_text(float(upper) * alias.scale) if alias.scale != 1 else upper
    return labels


def _difference(alias: Alias) -> str:
    """Tell, for the help text, how the copy differs from the metric."""
    only = f" of {alias.value}" if alias.value else ""
    times = f" times {alias.scale:g}" if alias.scale != 1 else ""
    return only + times


class RelevanceMetrics:
    """Metrics of images that were encoded region by region. The gauges show the last image of an answer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = {name: Gauge(name, text, registry=registry) for name, text in RELEVANCE_GAUGES.items()}
        self._tensions = Gauge(TENSION_GAUGE, TENSION_TEXT, ["tension"], registry=registry)
        self._spreads = {
            name: Histogram(name, text, buckets=buckets, registry=registry)
            for name, (text, buckets) in RELEVANCE_SPREADS.items()
        }

    def observe(self, record: RelevanceRecord) -> None:
        """Record one image of an answer."""
        tokens = [count for _, count in record.regions]
        propositional, perspectival, participatory = record.ways
        for name, value in (
            ("arr_coc_avg_tokens_per_patch", sum(tokens) / len(tokens)),
            ("arr_coc_propositional_score", propositional),
            ("arr_coc_perspectival_score", perspectival),
            ("arr_coc_participatory_score", participatory),
        ):
            self._gauges[name].set(value)
        for name, value in zip(TENSIONS, record.tensions, strict=True):
            self._tensions.labels(name).set(value)
        for relevance, count in record.regions:
            self._spreads["arr_coc_relevance_score_dist"].observe(relevance)
            self._spreads["arr_coc_token_allocation"].observe(count)
        self._spreads["arr_coc_lod_allocation_time_ms"].observe(1000 * record.seconds)
