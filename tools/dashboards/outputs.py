"""All generated files, by their path in the repository."""

from __future__ import annotations

from pathlib import Path

from fovea.deploy.monitoring.files import alert_rules, recording_rules
from fovea.deploy.monitoring.objectives import Alert, alert_groups
from tools.dashboards.caches import caches
from tools.dashboards.case import Case, test_file
from tools.dashboards.gateway import gateway
from tools.dashboards.gateway_cases import GATEWAYS
from tools.dashboards.images import images
from tools.dashboards.objectives import fill_objectives
from tools.dashboards.overview import overview
from tools.dashboards.page import text_of
from tools.dashboards.recording_cases import recording_tests
from tools.dashboards.server_cases import BUDGETS, MEMORY, SERVERS
from tools.dashboards.slo import slo

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "src/fovea/deploy/monitoring"
PAGE = "docs/monitoring.md"
CASES: dict[str, tuple[Case, ...]] = {
    "budgets": BUDGETS,
    "server": SERVERS,
    "memory": MEMORY,
    "gateway": GATEWAYS,
}


STEPS = {"memory": "5m"}
"""Time between two evaluations, for cases that last for hours."""
RULES = {"gateway": ("recording", "alerts")}
"""Files of rules that cases need, if not only the alerts."""


def outputs() -> dict[str, str]:
    """Return the text of every generated file."""
    alerts = {rule.name: rule for group in alert_groups() for rule in group.rules if isinstance(rule, Alert)}
    boards = {make.__name__: text_of(make()) for make in (overview, images, caches, gateway, slo)}
    return {
        **{f"{FOLDER}/dashboards/{name}.json": text for name, text in boards.items()},
        f"{FOLDER}/rules/recording.yml": recording_rules(),
        f"{FOLDER}/rules/alerts.yml": alert_rules(),
        **{
            f"{FOLDER}/rules/tests/{name}.yml": test_file(
                cases, alerts, STEPS.get(name, "2m"), RULES.get(name, ("alerts",))
            )
            for name, cases in CASES.items()
        },
        f"{FOLDER}/rules/tests/recording.yml": recording_tests(),
        PAGE: fill_objectives((ROOT / PAGE).read_text(encoding="utf-8")),
    }
