"""A case of an alert: series with which it fires, and series with which it does not; written for promtool."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fovea.deploy.monitoring.files import RUNBOOKS
from fovea.deploy.monitoring.objectives import Alert, as_yaml

SERVER = {"job": "fovea", "instance": "a:8000"}
GATEWAY = {"job": "fovea-gateway", "instance": "g:8080"}
Series = Mapping[str, str]
"""Values by series, in promtool's notation: one value per minute."""


class Case(NamedTuple):
    """One alert with two sets of series.

    labels: of the alert that fires, without its severity.
    shown: its value as the description shows it.
    fires: series with which it fires.
    silent: series with which it does not, near its bound.
    at: time at which both are looked at.
    """

    alert: str
    labels: Mapping[str, str]
    shown: str
    fires: Series
    silent: Series
    at: str = "20m"


def test_file(cases: Sequence[Case], alerts: Mapping[str, Alert], step: str, rules: Sequence[str]) -> str:
    """Return a file for `promtool test rules`.

    step: between two evaluations of the rules. rules: names of the files of rules.
    """
    tests = [test for case in cases for test in (_fires(case, alerts[case.alert]), _silent(case))]
    head = "# Written by tools/dashboards from its cases. Run it: promtool test rules FILE\n"
    files = [f"../{name}.yml" for name in rules]
    return head + as_yaml({"rule_files": files, "evaluation_interval": step, "tests": tests})


def _fires(case: Case, alert: Alert) -> dict[str, Any]:
    texts = {"summary": alert.summary, "description": alert.description}
    expected = {
        "exp_labels": {"severity": alert.severity, **case.labels},
        "exp_annotations": {
            **{name: _filled(text, case) for name, text in texts.items()},
            "runbook_url": f"{RUNBOOKS}#{alert.anchor}",
        },
    }
    checks = [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": [expected]}]
    if alert.hold != "0m":  # before that time it is only pending
        checks.append({"eval_time": "0m", "alertname": case.alert, "exp_alerts": []})
    return {
        "name": f"{case.alert} fires",
        "interval": "1m",
        "input_series": _series(case.fires),
        "alert_rule_test": checks,
    }


def _silent(case: Case) -> dict[str, Any]:
    return {
        "name": f"{case.alert} stays silent",
        "interval": "1m",
        "input_series": _series(case.silent),
        "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": []}],
    }


def _series(series: Series) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in series.items()]


def _filled(template: str, case: Case) -> str:
    """Return a template with its labels and its value."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: case.labels[found[1]], template)
    return re.sub(r"\{\{ \$value[^}]*\}\}", lambda _: case.shown, text)


def server(metric: str, more: str = "") -> str:
    """Return a series of a server."""
    return _named(metric, SERVER, more)


def gateway(metric: str, more: str = "") -> str:
    """Return a series of a gateway."""
    return _named(metric, GATEWAY, more)


def _named(metric: str, labels: Mapping[str, str], more: str) -> str:
    own = ", ".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{metric}{{{own}{', ' if more else ''}{more}}}"
