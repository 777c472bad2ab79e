"""Rules of Prometheus as values, and their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

SEVERITIES = ("critical", "warning", "info")
WIDTH = 110
"""Columns of a rules file. Long expressions are folded."""


class Record(NamedTuple):
    """A recording rule: its result is stored as a series.

    name: of the new series.
    labels: that it gets, beside those of the result.
    text: what the series says, for the documentation.
    """

    name: str
    expression: str
    labels: Mapping[str, str] = {}
    text: str = ""


class Condition(NamedTuple):
    """A part of an alert: an expression, and what its value is compared with.

    value: PromQL; it returns a series on every healthy server, unless a metric is missing.
    test: comparison operator and its right side.
    """

    value: str
    test: str

    def __str__(self) -> str:
        return f"{self.value} {self.test}".strip()


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert. It fires if all conditions have been true for a time.

    hold: duration before it fires, as Prometheus writes it.
    severity: critical: wake somebody up; warning: look at it today; info: good to know.
    conditions: joined by `and`. The value of the first one is the alert's value.
    summary, description: templates of Prometheus.
    """

    name: str
    severity: str
    hold: str
    conditions: tuple[Condition, ...]
    summary: str
    description: str

    @property
    def expression(self) -> str:
        """The whole PromQL expression."""
        return " and ".join(str(condition) for condition in self.conditions)

    @property
    def anchor(self) -> str:
        """Anchor of the alert's heading in the runbooks."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated one after another, so that later ones see the results of earlier ones.

    interval: time between two evaluations, as Prometheus writes it; "": the global setting.
    """

    name: str
    rules: Sequence[Record | Alert]
    interval: str = ""


def rules_text(groups: Sequence[Group], runbooks: str, head: str) -> str:
    """Return a rules file.

    runbooks: address of the page of runbooks, without an anchor.
    head: lines of the comment at its top.
    """
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return comment + as_yaml({"groups": [_group(group, runbooks) for group in groups]})


def as_yaml(value: Any) -> str:
    """Return a value as YAML, its keys in their order."""
    return yaml.safe_dump(value, sort_keys=False, width=WIDTH, allow_unicode=True)


def _group(group: Group, runbooks: str) -> dict[str, Any]:
    interval = {"interval": group.interval} if group.interval else {}
    return {
        "name": group.name,
        **interval,
        "rules": [
            _record(rule) if isinstance(rule, Record) else _alert(rule, runbooks) for rule in group.rules
        ],
    }


def _record(rule: Record) -> dict[str, Any]:
    labels = {"labels": dict(rule.labels)} if rule.labels else {}
    return {"record": rule.name, "expr": rule.expression, **labels}


def _alert(alert: Alert, runbooks: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.hold,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{runbooks}#{alert.anchor}",
        },
    }
