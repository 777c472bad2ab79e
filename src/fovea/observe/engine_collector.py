"""Reads the figures of the engine and the media caches, and makes metrics of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fovea.core.tally import bucket_key, sum_key
from fovea.observe.alias_copy import bound_text
from fovea.observe.aliases import CACHE_CONFIG, CACHE_CONFIG_LABELS, CACHE_CONFIG_TEXT, ENGINE
from fovea.observe.table import COUNTERS, DISTRIBUTIONS, GAUGES, RATES, SHARES, Distribution, Share
from fovea.observe.window import RateWindow

Stats = Callable[[], Mapping[str, float]]


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
