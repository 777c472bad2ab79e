"""Service-level targets: their values, whether a run met them, and which answers count as good."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fovea.bench.measure import Bounds, Summary
from fovea.core.config_files import check_keys, errors_in, read_json, read_toml
from fovea.core.errors import ConfigError

SPREADS = ("ttft", "gap", "longest_gap", "tpot", "end_to_end")
PERCENTILES = ("p50", "p90", "p95", "p99")
AT_MOST = (
    *(f"{spread}_{percentile}_ms" for spread in SPREADS for percentile in PERCENTILES),
    "error_rate",
    "cost_per_request",
)
AT_LEAST = ("requests_per_s", "tokens_per_s", "good", "goodput", "visual_tokens_saved")
KNOWN_TARGETS = (*AT_MOST, *AT_LEAST)
RATES = ("requests_per_s", "goodput")


@dataclass(frozen=True, slots=True)
class Sla:
    """A service-level agreement.

    source: where the figures come from, for the reader.
    good: bounds that one request must keep to count as good.
    targets: limit of each figure, by its name; names in AT_MOST are upper limits, names in AT_LEAST lower
        limits.

    Raises ConfigError for an unknown name or a value that is not a number from 0 on.
    """

    source: str
    good: Bounds
    targets: Mapping[str, float]

    def __post_init__(self) -> None:
        check_keys("", self.targets, KNOWN_TARGETS, "target")
        for name, value in self.targets.items():
            _number(name, value)
        for field in fields(Bounds):
            if (bound := getattr(self.good, field.name)) is not None:
                _number(field.name, bound)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one target was met.

    name, limit: the target. at_most: whether the limit is an upper one.
    value: the measured figure; nan if it could not be measured.
    met: None if the figure could not be measured, or if the run could not test it.
    """

    name: str
    value: float
    limit: float
    at_most: bool
    met: bool | None


def read_sla(path: Path) -> Sla:
    """Read targets from a TOML file, or from a JSON file if its name ends in .json.

    Raises ConfigError, which names the key and the accepted values.
    """
    values = read_json(path, param="sla") if path.suffix == ".json" else read_toml(path, param="sla")
    with errors_in(str(path)):
        return _sla(values, str(path))


def judge(
    sla: Sla, summary: Summary, price_per_hour: float | None = None, offered_rate: float | None = None
) -> list[Verdict]:
    """Compare the figures of a run with every target.

    price_per_hour: price of the server's machine, in the currency of `cost_per_request`.
    offered_rate: requests per second that arrived, where arrivals did not wait for answers. A server cannot
        serve more than arrive, so a rate target above this is not tested.
    """
    verdicts = []
    for name, limit in sla.targets.items():
        value, at_most = _figure(name, sla, summary, price_per_hour), name in AT_MOST
        within = value <= limit if at_most else value >= limit
        possible = offered_rate is None or name not in RATES or offered_rate >= limit
        testable = possible and not math.isnan(value)
        verdicts.append(Verdict(name, value, limit, at_most, within if testable else None))
    return verdicts


def _figure(name: str, sla: Sla, summary: Summary, price_per_hour: float | None) -> float:
    derived: dict[str, Callable[[], float]] = {
        "error_rate": lambda: summary.failed / summary.requests if summary.requests else math.nan,
        "cost_per_request": lambda: _cost(summary, price_per_hour),
        "visual_tokens_saved": lambda: _saved(summary),
    }
    if name in derived:
        return derived[name]()
    if name.endswith("_ms"):
        spread, _, percentile = name.removesuffix("_ms").rpartition("_")
        return float(getattr(getattr(summary, spread), percentile))
    return float(getattr(summary, name))


def _cost(summary: Summary, price_per_hour: float | None) -> float:
    answers = summary.requests - summary.failed
    if price_per_hour is None or not answers:
        return math.nan
    return price_per_hour / 3600 * summary.seconds / answers


def _saved(summary: Summary) -> float:
    """Share of the visual tokens that were left out, of those that images of these sizes have.

    nan without images, and if the server does not report it.
    """
    if not summary.unreduced_tokens or summary.image_tokens is None:
        return math.nan
    return 1 - summary.image_tokens / summary.unreduced_tokens


def _sla(values: Mapping[str, Any], path: str) -> Sla:
    check_keys("", values, ("source", "good", "targets"))
    good, targets = _table(values, "good"), _table(values, "targets")
    check_keys("", good, [field.name for field in fields(Bounds)])
    source = values.get("source", path)
    if not isinstance(source, str):
        raise ConfigError(f"source is {source!r}; accepted: a text in quotes")
    return Sla(source, Bounds(**good), targets)


def _table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is {table!r}; accepted: a table [{name}] of names and numbers")
    return table


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {value!r}; accepted: a number from 0 on", param="sla")


DEFAULT_SLA = Sla(
    source="production targets of the ARR-COC-0-1 documents, for one T4",
    good=Bounds(end_to_end_ms=1000.0),
    targets={
        "end_to_end_p50_ms": 200.0,
        "end_to_end_p95_ms": 500.0,
        "end_to_end_p99_ms": 1000.0,
        "requests_per_s": 50.0,
        "error_rate": 0.001,
        "visual_tokens_saved": 0.3,
        "cost_per_request": 0.02,
    },
)
"""The default targets.

The source promises its 99th percentile of latency to nearly every request, so that is also the bound for a
good answer. Its availability target (99.9% of a month) is left out, because a run cannot measure it.
"""
