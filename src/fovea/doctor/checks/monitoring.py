"""Checks of monitoring: metrics, and whether Prometheus, Alertmanager and Grafana have what they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from fovea.core.errors import EngineError
from fovea.doctor.check import Check, Need, Verdict, failed, passed, plural, warned
from fovea.doctor.server import bearer
from fovea.doctor.subject import Subject

NEEDED = ("fovea:ready", "fovea:requests_waiting", "fovea:kv_usage", "fovea:connections_open")
"""Series that alerts and dashboards use, and that exist from the start."""
PREFIXES = ("fovea:", "fovea_gateway_", "vllm:", "sglang:", "nv_", "tgi_")
JOB = "fovea"


def metrics(subject: Subject) -> Verdict:
    """Does the server export the metrics that alerts are made of?"""
    values = subject.server.metrics()
    figure = plural(len(values), "name")
    if not any(name.startswith(PREFIXES) for name in values):
        return failed(figure, "none of them is of an inference server", "check the URL")
    absent = [name for name in NEEDED if name not in values] if subject.server.is_fovea else []
    if absent:
        return failed(
            f"{figure}, without {', '.join(absent)}", "alerts on them stay silent", "update the server"
        )
    return passed(figure)


def scraped(subject: Subject) -> Verdict:
    """Does Prometheus scrape the server, with success?"""
    targets = list(_targets(_get(subject, "/api/v1/targets?state=active").get("activeTargets")))
    ours = [target for target in targets if _is_ours(subject, target)]
    if not ours:
        wanted = subject.live.url if subject.live is not None else f"a job named {JOB}"
        return failed(
            f"{plural(len(targets), 'target')}, none of them {wanted}",
            "no dashboard and no alert knows the server",
            "scrape_configs: in prometheus.yml; docs/monitoring.md has the file",
        )
    down = [target for target in ours if target.get("health") != "up"]
    if down:
        return failed(
            f"{len(down)} of {plural(len(ours), 'target')} down",
            str(down[0].get("lastError", "")) or f"health is {down[0].get('health')}",
            "give Prometheus a metrics key: authorization in its scrape_configs",
        )
    return passed(f"{plural(len(ours), 'target')} up")


def rules(subject: Subject) -> Verdict:
    """Are the recording rules loaded, and do they evaluate?"""
    return _groups(subject, subject.monitoring.records, "dashboards and alerts read what they record")


def alerts(subject: Subject) -> Verdict:
    """Are the alerts loaded, and do they evaluate?"""
    return _groups(subject, subject.monitoring.alerts, "nobody is told when the server fails")


def receivers(subject: Subject) -> Verdict:
    """Does Prometheus send its alerts to an Alertmanager?"""
    found = _get(subject, "/api/v1/alertmanagers").get("activeAlertmanagers")
    count = len(found) if isinstance(found, list) else 0
    if not count:
        return warned(
            "none", "alerts are shown in Prometheus, and sent to no one", "alerting: in prometheus.yml"
        )
    return passed(plural(count, "Alertmanager"))


def dashboards(subject: Subject) -> Verdict:
    """Has Grafana the dashboards?"""
    headers = bearer(subject.grafana_token)
    absent = []
    for uid in subject.monitoring.dashboards:
        answer = subject.web.request("GET", f"{subject.grafana}/api/dashboards/uid/{uid}", headers=headers)
        if answer.status in (401, 403):
            return failed(
                f"status {answer.status}", "Grafana wants another token", "FOVEA_GRAFANA_TOKEN=TOKEN"
            )
        if answer.status != 200:
            absent.append(uid)
    total = len(subject.monitoring.dashboards)
    if absent:
        return failed(
            f"{total - len(absent)} of {total}", f"missing: {', '.join(absent)}", "docs/monitoring.md"
        )
    return passed(f"{total} of {total}")


def _groups(subject: Subject, names: Sequence[str], harm: str) -> Verdict:
    """Judge groups of rules. names: the groups that should be loaded."""
    groups = {
        str(group.get("name")): group for group in _targets(_get(subject, "/api/v1/rules").get("groups"))
    }
    absent = [name for name in names if name not in groups]
    if absent:
        return failed(
            f"{len(names) - len(absent)} of {plural(len(names), 'group')}",
            f"missing: {', '.join(absent)}; {harm}",
            "rule_files: in prometheus.yml; docs/monitoring.md has the files",
        )
    ours = [rule for name in names for rule in _targets(groups[name].get("rules"))]
    broken = [rule for rule in ours if rule.get("health") == "err"]
    if broken:
        return failed(
            f"{len(broken)} of {plural(len(ours), 'rule')} fail",
            f"{broken[0].get('name')}: {broken[0].get('lastError', '')}",
            "write the rules again: docs/monitoring.md",
        )
    return passed(f"{plural(len(ours), 'rule')} in {plural(len(names), 'group')}")


def _get(subject: Subject, path: str) -> Mapping[str, Any]:
    """Return the data of an answer of Prometheus' API. Raises EngineError if there is none."""
    answer = subject.web.request("GET", subject.prometheus + path)
    value = answer.json
    data = value.get("data") if isinstance(value, dict) else None
    if answer.status != 200 or not isinstance(data, dict):
        raise EngineError(f"{subject.prometheus}{path} answers {answer.status} {answer.message}")
    return data


def _targets(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a list; nothing if it is none."""
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def _is_ours(subject: Subject, target: Mapping[str, Any]) -> bool:
    """Tell whether a target is the examined server; without a URL, whether its job is one of Fovea's."""
    labels = target.get("labels")
    job = str(labels.get("job", "")) if isinstance(labels, dict) else ""
    if subject.live is None:
        return job.startswith(JOB)
    ours, theirs = urlsplit(subject.live.url), urlsplit(str(target.get("scrapeUrl", "")))
    return ours.port == theirs.port and (ours.hostname == theirs.hostname or job.startswith(JOB))


CHECKS = (
    Check("monitoring", "metrics", "metrics of the server", metrics),
    Check("monitoring", "scraped", "scrapes by Prometheus", scraped, (Need.PROMETHEUS,)),
    Check("monitoring", "rules", "recording rules", rules, (Need.PROMETHEUS,)),
    Check("monitoring", "alerts", "alerts", alerts, (Need.PROMETHEUS,)),
    Check("monitoring", "receivers", "receivers of alerts", receivers, (Need.PROMETHEUS,)),
    Check("monitoring", "dashboards", "dashboards of Grafana", dashboards, (Need.GRAFANA,)),
)
