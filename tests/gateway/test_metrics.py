"""Metrics: names are bounded, and every declared metric can be counted and scraped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fovea.gateway.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics, Names


@given(st.lists(st.text(max_size=3), max_size=60), st.integers(0, 8))
def test_names_are_bounded_and_the_first_stay(names: list[str], most: int) -> None:
    bound = Names(most)
    shown = [bound(name) for name in names]
    first = list(dict.fromkeys(names))[:most]
    assert shown == [name if name in first else "other" for name in names]


def test_every_metric_can_be_scraped() -> None:
    metrics = Metrics()
    for name, row in COUNTERS.items():
        metrics.count(name, *(f"{label}1" for label in row.labels), by=2)
        metrics.count(name, *(f"{label}1" for label in row.labels))
    for name, row in HISTOGRAMS.items():
        metrics.observe(name, 0.3, *row.labels)
    for name, row in GAUGES.items():
        metrics.set(name, 7, *row.labels)
    lines = metrics.exposition().body.decode().splitlines()
    for name in COUNTERS:
        assert any(line.startswith(f"fovea_gateway_{name}_total") and line.endswith(" 3.0") for line in lines)
    for name in HISTOGRAMS:
        assert any(line.startswith(f"fovea_gateway_{name}_count") and line.endswith(" 1.0") for line in lines)
    for name in GAUGES:
        assert any(line.startswith(f"fovea_gateway_{name}") and line.endswith(" 7.0") for line in lines)


def test_gauges_are_set_when_they_are_scraped() -> None:
    metrics, values = Metrics(), iter([1.0, 5.0])
    metrics.refresh = lambda into: into.set("queued", next(values), "m")
    assert b'fovea_gateway_queued{model="m"} 1.0' in metrics.exposition().body
    assert b'fovea_gateway_queued{model="m"} 5.0' in metrics.exposition().body


def test_connections() -> None:
    metrics = Metrics()
    metrics.count_refused_connection("full")
    metrics.count_connection_timeout("headers")
    text = metrics.exposition().body
    assert b'connections_refused_total{reason="full"} 1.0' in text
    assert b'connection_timeouts_total{kind="headers"} 1.0' in text
