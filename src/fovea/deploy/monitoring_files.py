"""The files of Prometheus, Alertmanager and Grafana for a deployment, and the checks of these files."""

from __future__ import annotations

from collections.abc import Sequence

from fovea.deploy.monitoring import files as monitoring
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files

PROMETHEUS, ALERTMANAGER = "prometheus/prometheus.yml", "alertmanager/alertmanager.yml"
RULES = ("prometheus/recording.yml", "prometheus/alerts.yml")


def prometheus_files(
    spec: DeploySpec,
    engines: Sequence[str],
    gateways: Sequence[str],
    alertmanager: str,
    *,
    key_file: str = "",
) -> Files:
    """Return the files of Prometheus and Alertmanager; none without [monitoring].

    engines, gateways: addresses of the servers, as HOST:PORT.
    alertmanager: address of Alertmanager, as HOST:PORT.
    key_file: file of the key for /metrics; "": no key is needed.
    """
    if spec.monitoring is None:
        return {}
    webhook = spec.monitoring.alert_webhook
    files = {
        PROMETHEUS: monitoring.prometheus_config(
            engines,
            gateways,
            alertmanager if webhook else "",
            interval=f"{spec.monitoring.scrape_s}s",
            key_file=key_file,
        ),
        RULES[0]: monitoring.recording_rules(),
        RULES[1]: monitoring.alert_rules(spec.monitoring.runbooks or monitoring.RUNBOOKS),
    }
    if webhook:
        files[ALERTMANAGER] = monitoring.alertmanager_config(webhook)
    return files


def grafana_files(spec: DeploySpec) -> Files:
    """Return the files of Grafana, beneath grafana/; none if the spec has no Grafana."""
    if spec.monitoring is None or not spec.monitoring.grafana:
        return {}
    provisioning = monitoring.grafana_provisioning()
    return {
        **{f"grafana/provisioning/{path}": text for path, text in provisioning.items()},
        **{f"grafana/dashboards/{path}": text for path, text in monitoring.dashboards().items()},
    }


def monitoring_checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the checks of the files of Prometheus and Alertmanager."""
    if spec.monitoring is None:
        return ()
    config = ("check", "config", "--syntax-only", f"{{dir}}/{PROMETHEUS}")
    rules = ("check", "rules", *(f"{{dir}}/{path}" for path in RULES))
    checks = [
        Check("promtool", config, f"Prometheus reads {PROMETHEUS}"),
        Check("promtool", rules, "Prometheus reads the rules"),
    ]
    if spec.monitoring.alert_webhook:
        arguments = ("check-config", f"{{dir}}/{ALERTMANAGER}")
        checks.append(Check("amtool", arguments, f"Alertmanager reads {ALERTMANAGER}"))
    return tuple(checks)
