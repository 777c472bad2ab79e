"""Asks a Prometheus what expressions return, and finds those that return nothing."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from fovea.deploy.monitoring.files import dashboards, recording_rules
from fovea.deploy.monitoring.objectives import Alert, alert_groups
from tests.deploy.promql import filled, selectors, without_offset

PATIENCE_S = 60.0
POLL_S = 0.2


class Checked(NamedTuple):
    """One expression. where: the panel, rule or alert that has it."""

    where: str
    expression: str


class Prometheus:
    """The HTTP API of a Prometheus. address: as HOST:PORT."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=30)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def query(self, expression: str) -> list[Any]:
        """Return the series of an expression now. Raises AssertionError if it is wrong."""
        self._connection.request("GET", f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        answer = json.load(self._connection.getresponse())
        assert answer["status"] == "success", f"{expression}: {answer['error']}"
        return list(answer["data"]["result"])

    def wait_for(self, expression: str) -> list[Any]:
        """Wait until an expression returns a series."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.query(expression)):
            assert time.monotonic() < deadline, f"{expression} has returned nothing for {PATIENCE_S} s"
            time.sleep(POLL_S)
        return found


def panel_expressions(boards: Mapping[str, str] | None = None) -> Iterator[Checked]:
    """Yield the expression of every panel, with values for its variables."""
    for name, text in (boards or dashboards()).items():
        for panel in panels(json.loads(text)):
            for target in panel["targets"]:
                yield Checked(f"{name}: {panel['title']}", filled(target["expr"]))


def panels(board: Any) -> Iterator[Any]:
    """Yield the panels of a dashboard that show something, those inside of rows included."""
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panels({"panels": panel.get("panels") or []})
        else:
            yield panel


def variable_expressions() -> Iterator[Checked]:
    """Yield, for every variable of a dashboard that is a query, the values of its label."""
    for name, text in dashboards().items():
        for variable in json.loads(text)["templating"]["list"]:
            if variable["type"] == "query":
                match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
                assert match is not None, variable["query"]
                selector, label = filled(match[1]), match[2]
                labelled = f'{{{label}!=""}}' if "{" not in selector else ""
                yield Checked(f"{name}: ${variable['name']}", f"count by ({label}) ({selector}{labelled})")


def rule_expressions(text: str | None = None) -> Iterator[Checked]:
    """Yield the expression of every recording rule, and the series that it records."""
    for group in yaml.load(text or recording_rules(), Loader=yaml.CSafeLoader)["groups"]:
        for rule in group["rules"]:
            own = ", ".join(f'{name}="{value}"' for name, value in rule.get("labels", {}).items())
            yield Checked(f"rule {rule['record']}", rule["expr"])
            yield Checked(f"result of {rule['record']}", f"{rule['record']}{{{own}}}")


def alerts() -> list[Alert]:
    """Return all alerts."""
    return [rule for group in alert_groups() for rule in group.rules if isinstance(rule, Alert)]


def alert_expressions(given: Iterable[Alert] | None = None) -> Iterator[Checked]:
    """Yield the values that alerts compare, without the comparison, and the present in place of the past."""
    for alert in given or alerts():
        for condition in alert.conditions:
            yield Checked(f"alert {alert.name}", without_offset(condition.value))


def all_selectors() -> dict[str, str]:
    """Return every selector of panels, rules and alerts, and the first place that has it."""
    whole = [Checked(f"alert {alert.name}", alert.expression) for alert in alerts()]
    found: dict[str, str] = {}
    for checked in (*panel_expressions(), *rule_expressions(), *whole):
        for selector in selectors(checked.expression):
            found.setdefault(selector, checked.where)
    return found


def empty(prometheus: Prometheus, expressions: Iterable[Checked]) -> list[Checked]:
    """Return the expressions that return nothing now."""
    return [checked for checked in expressions if not prometheus.query(checked.expression)]
