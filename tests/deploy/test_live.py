"""A real Prometheus scrapes a loaded server and gateway: every panel, rule and alert returns a series.

The server simulates its engine, and in the slow test it runs the bundled model. An expression that returns
nothing must be listed below with its reason, and one that is listed must return nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fovea.deploy.monitoring.files import alert_rules, prometheus_config, recording_rules
from fovea.deploy.monitoring.rule import Condition
from tests.deploy.queries import (
    Checked,
    Prometheus,
    alert_expressions,
    alerts,
    all_selectors,
    empty,
    panel_expressions,
    rule_expressions,
    still_empty,
)
from tests.deploy.stack import METRICS_KEY, Stack, load, stack
from tests.support.servers import prometheus

NO_GPU = not Path("/dev/nvidiactl").exists()
GPU = "this machine has no GPU"
HEALTHY = "nothing of this kind happens in a healthy run"
SIMULATED = "the simulator encodes no regions"
SILENT = {
    'fovea:requests_total{job=~".+", instance=~".+", route=~"ROUTES", status=~"5.."}': HEALTHY,
}
ABSENT = "absent(up"


def accelerated(text: str) -> str:
    """Return rules that are evaluated at the global interval, and alerts that fire after a second."""
    rules = yaml.safe_load(text)
    for group in rules["groups"]:
        group.pop("interval", None)
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "1s"
    return str(yaml.safe_dump(rules))


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Stack, Prometheus]]:
    with stack("--simulate") as programs:
        load(programs)
        config = prometheus_config(
            [programs.server], [programs.gateway], interval="1s", key_file=str(programs.key_file)
        )
        files = {
            "prometheus.yml": config,
            "recording.yml": accelerated(recording_rules()),
            "alerts.yml": accelerated(alert_rules()),
        }
        with prometheus(files) as address:
            server = Prometheus(address)
            server.wait_for("fovea:requests_total")
            server.wait_for("fovea_gateway_requests_total")
            load(programs)
            yield programs, server


def test_try(running: tuple[Stack, Prometheus]) -> None:
    _, server = running
    for name, each in (
        ("panels", panel_expressions()),
        ("rules", rule_expressions()),
        ("alerts", alert_expressions()),
        ("selectors", [Checked(where, selector) for selector, where in all_selectors().items()]),
    ):
        each = list(each)
        left = still_empty(server, each)
        print(name, len(each), "empty:", len(left))
        for x in left:
            print("   ", x.where, "|", x.expression)
    assert 0
