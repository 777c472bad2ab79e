"""Floods of unknown names: the number of series stays below a bound, and nothing goes uncounted."""

from __future__ import annotations

from fovea.core.types import Delta
from fovea.gateway.metrics import COUNTERS, HISTOGRAMS, MOST_NAMES, MOST_REST, MOST_SERIES
from fovea.gateway.metrics import Metrics as GatewayMetrics
from fovea.observe.metrics import MOST_HISTOGRAMS, Metrics
from fovea.observe.metrics import MOST_SERIES as MOST_SERVER_SERIES
from fovea.observe.table import SPREADS, TOTALS

FLOOD = 2600


def series(metrics: Metrics | GatewayMetrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and values of all samples, by their name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_a_server_bounds_every_label() -> None:
    metrics = Metrics(dict, "model", "1.2")
    quiet = sum(map(len, series(metrics).values()))
    for number in range(FLOOD):
        name = f"name-{number}"
        metrics.observe_request(f"/v1/{name}", 100 + number, 0.1)
        metrics.count_refusal(name)
        metrics.count_denial(name)
        metrics.count_refused_connection(name)
        metrics.count_connection_timeout(name)
        metrics.observe_delta(Delta(0, "", finish_reason=name))  # type: ignore[arg-type]
    found = series(metrics)
    flooded = 5 * MOST_SERVER_SERIES + 3 * MOST_SERVER_SERIES  # the copies of `finished` count, too
    buckets = MOST_HISTOGRAMS * (len(SPREADS["request_seconds"].buckets) + 4)
    assert sum(map(len, found.values())) < quiet + 2 * flooded + buckets + 100
    for name in (name for name, row in TOTALS.items() if row.labels and name != "tokens"):
        values = found[f"fovea:{name}_total"]
        assert len(values) == MOST_SERVER_SERIES + 1
        assert sum(value for _, value in values) == FLOOD
        others = [value for labels, value in values if set(labels.values()) == {"other"}]
        assert others == [FLOOD - MOST_SERVER_SERIES]
    assert len(found["fovea:request_seconds_count"]) == MOST_HISTOGRAMS + 1


def test_a_gateway_bounds_every_label_and_their_combinations() -> None:
    metrics = GatewayMetrics()
    for number in range(FLOOD):
        for name, row in COUNTERS.items():
            metrics.count(name, *(f"{label}-{number * 7 % 2999}" for label in row.labels))
        for name, row in HISTOGRAMS.items():
            if number < 1200:
                metrics.observe(name, 0.1, *(f"{label}-{number}" for label in row.labels))
        # Each part is allowed: the bound is on the combinations.
        parts = (
            f"model-{number % MOST_NAMES}",
            f"tenant-{number // 31 % MOST_NAMES}",
            str(400 + number % 200),
        )
        metrics.count("requests", "chat", *parts)
    found = series(metrics)
    for name, row in COUNTERS.items():
        values = found[f"fovea_gateway_{name}_total"]
        assert len(values) <= MOST_SERIES + MOST_REST + 1
        assert sum(value for _, value in values) == FLOOD * (2 if name == "requests" else 1)
        for label in {"model", "tenant", "code"} & set(row.labels):
            assert len({labels[label] for labels, _ in values}) <= MOST_NAMES + 1
    for name in HISTOGRAMS:
        assert len(found[f"fovea_gateway_{name}_count"]) <= 1001
    assert sum(map(len, found.values())) < 80_000


def test_when_names_are_used_up_the_status_is_still_told() -> None:
    metrics = GatewayMetrics()
    for number in range(FLOOD):
        parts = f"model-{number % MOST_NAMES}", f"tenant-{number // MOST_NAMES}"
        metrics.count("requests", "chat", *parts, "200")
    metrics.count("requests", "chat", "model-1", "tenant-99", "503")
    text = metrics.exposition().body.decode()
    assert 'requests_total{api="chat",model="other",status="503",tenant="other"} 1.0' in text
    others = float(FLOOD - MOST_SERIES)
    assert f'requests_total{{api="chat",model="other",status="200",tenant="other"}} {others}' in text


def test_gauges_of_many_queues_add_up_under_one_name() -> None:
    metrics = GatewayMetrics()

    def refresh(into: GatewayMetrics) -> None:
        for number in range(MOST_NAMES + 5):
            into.set("queued", 2.0, into.models(f"m{number}"))

    metrics.refresh = refresh
    for _ in range(2):
        text = metrics.exposition().body.decode()
        assert 'fovea_gateway_queued{model="other"} 10.0' in text
        assert text.count("fovea_gateway_queued{") == MOST_NAMES + 1
