"""The configurations of Prometheus and Alertmanager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fovea.deploy.monitoring.rule import as_yaml

SERVER_JOB, GATEWAY_JOB = "fovea", "fovea-gateway"
INTERVAL = "15s"
RULES = ("recording.yml", "alerts.yml")
"""Names of the rules files, in the folder of the configuration."""


def prometheus_config(
    servers: Sequence[str],
    gateways: Sequence[str] = (),
    alertmanager: str = "",
    *,
    interval: str = INTERVAL,
    key_file: str = "",
    rules: Sequence[str] = RULES,
) -> str:
    """Return prometheus.yml.

    servers, gateways: their addresses, as HOST:PORT.
    alertmanager: address of Alertmanager; "": alerts are only shown by Prometheus.
    interval: between two scrapes, and between two evaluations of the rules.
    key_file: file that holds a metrics key or an admin key; "": /metrics needs none.
    rules: paths of the rules files; relative ones begin at the folder of prometheus.yml.
    """
    jobs = ((SERVER_JOB, servers), (GATEWAY_JOB, gateways))
    config: dict[str, Any] = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": list(rules),
        "scrape_configs": [_job(name, targets, key_file) for name, targets in jobs if targets],
    }
    if alertmanager:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    return as_yaml(config)


def _job(name: str, targets: Sequence[str], key_file: str) -> dict[str, Any]:
    key = {"authorization": {"credentials_file": key_file}} if key_file else {}
    return {"job_name": name, **key, "static_configs": [{"targets": list(targets)}]}


def alertmanager_config(
    webhook_url: str,
    *,
    critical_url: str = "",
    wait: str = "30s",
    interval: str = "5m",
    repeat: str = "4h",
) -> str:
    """Return alertmanager.yml, which sends alerts to webhooks, grouped by name and job.

    webhook_url: gets all alerts.
    critical_url: gets the critical ones in its place; "": they go to `webhook_url`, too.
    wait: time to collect alerts of a new group before its first message.
    interval: time between two messages about a group that changes.
    repeat: time after which a message about a group that has not changed is repeated.

    A server that is down hides its other alerts, and a critical alert the less severe ones about the same
    objective.
    """
    receivers = [_receiver("team", webhook_url)]
    routes: list[dict[str, Any]] = []
    if critical_url:
        receivers.append(_receiver("pager", critical_url))
        routes = [{"matchers": ['severity="critical"'], "receiver": "pager"}]
    config = {
        "route": {
            "receiver": "team",
            "group_by": ["alertname", "job", "slo"],
            "group_wait": wait,
            "group_interval": interval,
            "repeat_interval": repeat,
            "routes": routes,
        },
        "receivers": receivers,
        "inhibit_rules": [
            {
                "source_matchers": ['alertname="FoveaDown"'],
                "target_matchers": ['alertname!="FoveaDown"'],
                "equal": ["job", "instance"],
            },
            {
                "source_matchers": ['alertname=~"FoveaBudgetBurn.*"', 'severity="critical"'],
                "target_matchers": ['alertname=~"FoveaBudgetBurn.*"', 'severity!="critical"'],
                "equal": ["job", "slo"],
            },
        ],
    }
    return as_yaml(config)


def _receiver(name: str, url: str) -> dict[str, Any]:
    return {"name": name, "webhook_configs": [{"url": url, "send_resolved": True}]}
