"""A real Prometheus scrapes a loaded server and gateway: every panel, rule and alert returns a series.

The server simulates its engine; in the slow test it runs the bundled model. An expression that returns
nothing must name a metric that is listed below with its reason, and what is listed must return nothing.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from tools.dashboards.outputs import ROOT

from fovea.deploy.monitoring.files import (
    alert_rules,
    alertmanager_config,
    prometheus_config,
    recording_rules,
)
from fovea.deploy.monitoring.objectives import Condition
from tests.deploy.promql import selectors
from tests.deploy.queries import (
    Checked,
    Prometheus,
    alert_expressions,
    alerts,
    all_selectors,
    empty,
    panel_expressions,
    rule_expressions,
    variable_expressions,
)
from tests.deploy.stack import Stack, load, server_keys, stack
from tests.deploy.webhook import Webhook
from tests.support.servers import alertmanager, prometheus

HEALTHY = "it happens only if something fails that the load of this test leaves intact"
EXCEPTIONS = {
    'status=~"5.."': ("fovea:requests_total", HEALTHY),
    'outcome="failed"': ("fovea_gateway_experiment_requests_total", HEALTHY),
    "fovea_gateway_ejections_total": ("", HEALTHY),
    "fovea_gateway_traces": ("", "this gateway exports no traces"),
}
"""A part of selectors, the metric that they begin with, and why they return nothing."""
NO_GPU = {"fovea:device_": ("", "this machine has no GPU")}
SIMULATED = {"arr_coc_opponent_processing_balance": ("", "the simulator encodes no regions")}
NAME = (
    r"\b(?:fovea:[a-z_]+|fovea_(?:slo|rate|latency|ttft):\w+:\w+|fovea_gateway_[a-z_]+"
    r"|(?:process|cgroup)_[a-z_]+)(?![\w.*])"
)
"""Matches names of metrics in pages."""
ABSENT = 'absent(up{job=~"fovea.*"})'
"""The only expression that returns a series if something is missing."""


@dataclass(frozen=True)
class Monitored:
    """The loaded programs, the Prometheus that scrapes them, and the webhook that gets their alerts.

    exceptions: of this run.
    """

    programs: Stack
    prometheus: Prometheus
    webhook: Webhook
    exceptions: dict[str, tuple[str, str]]

    def is_excepted(self, selector: str) -> bool:
        """Whether a selector is listed."""
        return any(
            part in selector and selector.startswith(name) for part, (name, _) in self.exceptions.items()
        )

    def missing(self, expressions: list[Checked]) -> list[Checked]:
        """Return the expressions that return nothing without a listed reason."""
        return [
            checked
            for checked in empty(self.prometheus, expressions)
            if checked.expression != ABSENT and not any(map(self.is_excepted, selectors(checked.expression)))
        ]


def accelerated(text: str) -> str:
    """Return rules that are evaluated at the global interval, and alerts that fire after a second."""
    rules = yaml.load(text, Loader=yaml.CSafeLoader)
    for group in rules["groups"]:
        group.pop("interval", None)
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "1s"
    return str(yaml.dump(rules, Dumper=yaml.CSafeDumper))


@pytest.fixture(scope="module", params=["simulated", pytest.param("model", marks=pytest.mark.slow)])
def monitored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Monitored]:
    disk = str(tmp_path_factory.mktemp("disk"))
    simulated = request.param == "simulated"
    options = ["--simulate"] if simulated else ["--embed-disk-dir", disk, "--visual-tokens", "relevance:0.5"]
    exceptions = EXCEPTIONS | (SIMULATED if simulated else {})
    if not Path("/dev/nvidiactl").exists():
        exceptions |= NO_GPU
    with contextlib.ExitStack() as programs:
        webhook = programs.enter_context(Webhook())
        receiver = programs.enter_context(
            alertmanager(alertmanager_config(webhook.url, wait="1s", interval="1s", repeat="1h"))
        )
        running = programs.enter_context(stack(*options))
        load(running)
        config = prometheus_config(
            [running.server],
            [running.gateway],
            receiver,
            interval="1s",
            key_file=str(running.key_file),
            gateway_key_file=str(running.key_file),
        )
        files = {
            "prometheus.yml": config,
            "recording.yml": accelerated(recording_rules()),
            "alerts.yml": accelerated(alert_rules()),
        }
        server = Prometheus(programs.enter_context(prometheus(files)))
        programs.callback(server.close)
        server.wait_for("fovea:requests_total and on () fovea_gateway_requests_total")
        load(running)
        server.wait_for(f"min(timestamp(up)) > {time.time()}")  # the last request is in the metrics
        server.wait_for(f"min(timestamp(fovea_slo:budget_left:ratio30d)) > {time.time() + 2}")
        yield Monitored(running, server, webhook, exceptions)


def test_every_panel_returns_a_series(monitored: Monitored) -> None:
    expressions = list(panel_expressions())
    assert len(expressions) > 200
    assert not monitored.missing(expressions)


def test_every_variable_has_values(monitored: Monitored) -> None:
    expressions = list(variable_expressions())
    assert len(expressions) == 14
    assert not monitored.missing(expressions)


def test_every_rule_returns_a_series(monitored: Monitored) -> None:
    assert not monitored.missing(list(rule_expressions()))


def test_every_alert_compares_something(monitored: Monitored) -> None:
    """Without its comparison, an alert returns a series; with it, it can be evaluated."""
    assert not monitored.missing(list(alert_expressions()))
    for alert in alerts():
        monitored.prometheus.query(alert.expression)


def test_every_selector_finds_a_series(monitored: Monitored) -> None:
    """Also where an expression would return something without it: `x or vector(0)`."""
    found = [Checked(where, selector) for selector, where in all_selectors().items()]
    assert not monitored.missing(found)


def test_every_metric_of_the_pages_exists(monitored: Monitored) -> None:
    names = {
        name
        for page in ("monitoring.md", "runbooks.md")
        for name in re.findall(NAME, (ROOT / "docs" / page).read_text(encoding="utf-8"))
    }
    assert len(names) > 30
    assert not monitored.missing([Checked("docs", name) for name in sorted(names)])


def test_what_is_listed_returns_nothing(monitored: Monitored) -> None:
    known = list(all_selectors())
    for part, (name, _) in monitored.exceptions.items():
        listed = [Checked(part, each) for each in known if part in each and each.startswith(name)]
        assert listed, f"no expression has {part}"
        assert empty(monitored.prometheus, listed) == listed
    assert empty(monitored.prometheus, [Checked("absent", ABSENT)])


def test_a_wrong_name_is_found(monitored: Monitored) -> None:
    """A panel, a rule and an alert that name a metric which does not exist."""
    panels = [
        each._replace(expression=each.expression.replace("itl_seconds", "itl_second"))
        for each in panel_expressions()
    ]
    wrong = [each.where for each in panels if "itl_second_" in each.expression]
    assert [each.where for each in monitored.missing(panels)] == wrong != []

    text = recording_rules().replace("fovea:ttft_seconds_count[5m]", "fovea:ttft_count[5m]")
    rules = {each.where for each in monitored.missing(list(rule_expressions(text)))}
    assert rules == {"rule fovea_slo:all:rate5m", "rule fovea_slo:bad:rate5m"}

    alert = next(alert for alert in alerts() if alert.name == "FoveaQueueSlow")
    mutated = replace(alert, conditions=(Condition("fovea:oldest_waiting_second", "> 30"),))
    assert monitored.missing(list(alert_expressions([mutated])))


def test_an_alert_and_its_end_reach_a_webhook(monitored: Monitored) -> None:
    """The keys file is broken, so Prometheus fires, and Alertmanager delivers; then the file is repaired."""
    keys = monitored.programs.server_keys
    keys.write_text("[[key]]\nname = 7\n")
    fired = monitored.webhook.wait_for("FoveaKeysFileBroken", "firing")
    assert fired["labels"]["severity"] == "warning"
    assert fired["labels"]["instance"] == monitored.programs.server
    assert fired["annotations"]["runbook_url"].endswith("#foveakeysfilebroken")
    assert fired["annotations"]["description"].endswith("(keys_file_broken is 1).")
    keys.write_text(server_keys())
    ended = monitored.webhook.wait_for("FoveaKeysFileBroken", "resolved")
    assert ended["fingerprint"] == fired["fingerprint"]
