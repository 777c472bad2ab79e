"""Reads PromQL as far as the tests need it: which metrics an expression names, and with which labels."""

from __future__ import annotations

import re

GRAFANA = {
    "$__rate_interval": "1m",
    "$__interval_ms": "1000",
    "$__interval": "1s",
    "$__range": "5m",
    "$price_per_hour": "0.35",
    "$job": ".+",
    "$model": ".+",
    "$instance": ".+",
    "$slo": ".+",
}
"""Variables of dashboards, and the values that tests give them. Longer names come first."""
_WORDS = frozenset(("and", "or", "unless", "bool", "offset", "by", "on", "without", "ignoring"))
_CLAUSE = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)")
_RANGE = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")
_NAME = re.compile(r"(?<![\w.:$])([a-zA-Z_:][\w:]*+)(\s*\{(?:[^}\"]|\"[^\"]*\")*\})?(?!\s*\()")


def filled(expression: str) -> str:
    """Return the expression of a panel with values for its variables."""
    for name, value in GRAFANA.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def selectors(expression: str) -> list[str]:
    """Return every metric of an expression with its label matchers, without ranges and offsets."""
    rest = _RANGE.sub(" ", _CLAUSE.sub(" ", expression))
    found = (f"{name}{labels.strip()}" for name, labels in _NAME.findall(rest) if name.lower() not in _WORDS)
    return list(dict.fromkeys(found))


def without_offset(expression: str) -> str:
    """Return an expression that looks at the present where it looked at the past."""
    return re.sub(r"\s+offset\s+\w+", "", expression)
