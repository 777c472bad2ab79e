"""Prometheus metrics of relevance realization, with the names of the ARR-COC documents."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Histogram

from fovea.core.image import RelevanceRecord
from fovea.observe.request_table import (
    RELEVANCE_GAUGES,
    RELEVANCE_SPREADS,
    TENSION_GAUGE,
    TENSION_TEXT,
    TENSIONS,
)


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
