"""Service-level targets: what is promised, whether it was kept, and which answers were good."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fovea.bench.measure import Bounds, Summary
from fovea.core.errors import ConfigError

SPREADS = ("ttft", "gap", "longest_gap", "tpot", "end_to_end")
SHARES = ("p50", "p90", "p95", "p99")
AT_MOST = (
    *(f"{spread}_{share}_ms" for spread in SPREADS for share in SHARES),
    "error_rate",
    "cost_per_request",
)
AT_LEAST = ("requests_per_s", "tokens_per_s", "good", "goodput", "visual_tokens_saved")
KNOWN = (*AT_MOST, *AT_LEAST)
RATES = ("requests_per_s", "goodput")


@dataclass(frozen=True, slots=True)
class Sla:
    """source: where the figures come from. good: what one request must keep to be good.
    targets: name of what is measured to its limit. fixed_visual_tokens: per image, what `visual_tokens_saved` is a share of.
    """

    source: str
    good: Bounds
    targets: Mapping[str, float]
    fixed_visual_tokens: int = 256

    def __post_init__(self) -> None:
        for name, value in self.targets.items():
            if name not in KNOWN:
                raise ConfigError(f"unknown target {name!r}; {_hint(name, KNOWN)}", param="sla")
            _number(name, value)
        for field in fields(Bounds):
            if (bound := getattr(self.good, field.name)) is not None:
                _number(field.name, bound)
        fixed = self.fixed_visual_tokens
        if not isinstance(fixed, int) or isinstance(fixed, bool) or fixed < 1:
            raise ConfigError(
                f"fixed_visual_tokens is {fixed!r}; accepted: a whole number from 1 on", param="sla"
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """met: none where it could not be measured (value is nan), or was not put to the test."""

    name: str
    value: float
    limit: float
    at_most: bool
    met: bool | None


def read_sla(path: Path) -> Sla:
    """A TOML file, or JSON where its name ends so. Raises ConfigError naming the key and what is accepted."""
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} can not be read: {error.strerror}", param="sla") from error
    except ValueError as error:
        raise ConfigError(
            f"{path} is no {'JSON' if path.suffix == '.json' else 'TOML'}: {error}", param="sla"
        ) from error
    try:
        return _sla(values, str(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param="sla") from error


def judge(
    sla: Sla, summary: Summary, price_per_hour: float | None = None, offered: float | None = None
) -> list[Verdict]:
    """price_per_hour: of the machine that served, in the unit of `cost_per_request`.
    offered: requests per second that came, where answers did not decide it; more than came can not be served.
    """
    verdicts = []
    for name, limit in sla.targets.items():
        value, at_most = _measured(name, sla, summary, price_per_hour), name in AT_MOST
        kept = value <= limit if at_most else value >= limit
        tried = offered is None or name not in RATES or offered >= limit
        told = tried and not math.isnan(value)
        verdicts.append(Verdict(name, value, limit, at_most, kept if told else None))
    return verdicts


def _measured(name: str, sla: Sla, summary: Summary, price_per_hour: float | None) -> float:
    derived: dict[str, Callable[[], float]] = {
        "error_rate": lambda: summary.failed / summary.requests if summary.requests else math.nan,
        "cost_per_request": lambda: _cost(summary, price_per_hour),
        "visual_tokens_saved": lambda: _saved(sla, summary),
    }
    if name in derived:
        return derived[name]()
    if name.endswith("_ms"):
        spread, _, share = name.removesuffix("_ms").rpartition("_")
        return float(getattr(getattr(summary, spread), share))
    return float(getattr(summary, name))


def _cost(summary: Summary, price_per_hour: float | None) -> float:
    whole = summary.requests - summary.failed
    return (
        math.nan if price_per_hour is None or not whole else price_per_hour / 3600 * summary.seconds / whole
    )


def _saved(sla: Sla, summary: Summary) -> float:
    """Share of the visual tokens that the same images would cost at a fixed number each."""
    if not summary.images or summary.image_tokens is None:
        return math.nan
    return 1 - summary.image_tokens / (sla.fixed_visual_tokens * summary.images)


def _sla(values: Any, path: str) -> Sla:
    if not isinstance(values, dict):
        raise ConfigError("not an object")
    _known(values, ("source", "good", "targets", "fixed_visual_tokens"))
    good, targets = _table(values, "good"), _table(values, "targets")
    _known(good, tuple(field.name for field in fields(Bounds)))
    source = values.get("source", path)
    if not isinstance(source, str):
        raise ConfigError(f"source is {source!r}; accepted: text")
    return Sla(source, Bounds(**good), targets, values.get("fixed_visual_tokens", 256))


def _table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is {table!r}; accepted: names and numbers")
    return table


def _known(values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown key {name!r}; {_hint(name, known)}")


def _hint(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {value!r}; accepted: a number from 0 on", param="sla")


DOCUMENTED = Sla(
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
"""The default. Their 99th percentile is the bound that nearly every request is promised, so it says which one is good. Their
availability (99.9% of a month) is nothing that a run can measure."""
