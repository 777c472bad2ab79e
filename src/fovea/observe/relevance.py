"""Relevance realization in Prometheus' terms, by the names of the ARR-COC documents."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Histogram

from fovea.core.image import RelevanceRecord
from fovea.observe.table import RELEVANCE_GAUGES, RELEVANCE_SPREADS, TENSION_GAUGE, TENSIONS


class RelevanceMetrics:
    """Gauges show the image that was answered about last."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = {name: Gauge(name, text, registry=registry) for name, text in RELEVANCE_GAUGES.items()}
        self._tensions = Gauge(TENSION_GAUGE, "1 is the first of the pair", ["tension"], registry=registry)
        self._spreads = {
            name: Histogram(name, text, buckets=buckets, registry=registry)
            for name, (text, buckets) in RELEVANCE_SPREADS.items()
        }

    def observe(self, looked: RelevanceRecord) -> None:
        """One image of an answer."""
        tokens = [given for _, given in looked.regions]
        propositional, perspectival, participatory = looked.ways
        for name, value in (
            ("arr_coc_avg_tokens_per_patch", sum(tokens) / len(tokens)),
            ("arr_coc_propositional_score", propositional),
            ("arr_coc_perspectival_score", perspectival),
            ("arr_coc_participatory_score", participatory),
        ):
            self._gauges[name].set(value)
        for name, value in zip(TENSIONS, looked.tensions, strict=True):
            self._tensions.labels(name).set(value)
        for relevance, given in looked.regions:
            self._spreads["arr_coc_relevance_score_dist"].observe(relevance)
            self._spreads["arr_coc_token_allocation"].observe(given)
        self._spreads["arr_coc_lod_allocation_time_ms"].observe(1000 * looked.seconds)
