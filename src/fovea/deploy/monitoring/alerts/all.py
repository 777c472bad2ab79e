"""All alerts, in groups."""

from __future__ import annotations

from fovea.deploy.monitoring.alerts.burn import burn_alerts
from fovea.deploy.monitoring.alerts.gateway import gateway_alerts
from fovea.deploy.monitoring.alerts.memory import memory_alerts
from fovea.deploy.monitoring.alerts.server import server_alerts
from fovea.deploy.monitoring.rule import Group


def alert_groups() -> list[Group]:
    """Return the groups of alerts."""
    return [
        Group("fovea-budgets", burn_alerts()),
        Group("fovea-server", server_alerts()),
        Group("fovea-memory", memory_alerts()),
        Group("fovea-gateway", gateway_alerts()),
    ]
