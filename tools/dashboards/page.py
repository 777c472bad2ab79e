"""A dashboard: its name, its variables and its rows of panels."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from tools.dashboards.panels import SOURCE, AnyPanel

Row = tuple[str, Sequence[AnyPanel]]
SERVER_LABELS = {
    "job": "label_values(fovea:info, job)",
    "model": 'label_values(fovea:info{job=~"$job"}, model)',
    "instance": 'label_values(fovea:info{job=~"$job", model=~"$model"}, instance)',
}
"""Queries of the variables of servers. A server serves one model, so a model chooses instances."""
GATEWAY_LABELS = {
    "job": "label_values(fovea_gateway_backend_up, job)",
    "model": 'label_values(fovea_gateway_requests_total{job=~"$job"}, model)',
    "instance": 'label_values(fovea_gateway_backend_up{job=~"$job"}, instance)',
}
SLO_LABELS = {
    "job": "label_values(fovea_slo:ready:bool, job)",
    "slo": "label_values(fovea_slo:budget:ratio, slo)",
}


class Constant:
    """A number that a reader of a dashboard types in, such as a price."""

    def __init__(self, name: str, label: str, value: str) -> None:
        self.name, self.label, self.value = name, label, value

    def build(self) -> dashboard.TextBoxVariable:
        """Return the variable."""
        option = models.VariableOption(text=self.value, value=self.value, selected=True)
        box = dashboard.TextBoxVariable(self.name).label(self.label).default_value(self.value)
        return box.current(option)


def page(
    name: str,
    title: str,
    text: str,
    labels: dict[str, str],
    rows: Sequence[Row],
    constants: Sequence[Constant] = (),
) -> dashboard.Dashboard:
    """Return a dashboard with the uid `fovea-NAME`. labels: queries of its variables by name."""
    board = (
        dashboard.Dashboard(title)
        .uid(f"fovea-{name}")
        .description(text)
        .tags(["fovea"])
        .timezone("browser")
        .time("now-3h", "now")
        .refresh("30s")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Fovea")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["fovea"])
            .as_dropdown(True)
            .include_vars(False)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("data source").type("prometheus"))
    )
    for label, query in labels.items():
        board.with_variable(
            dashboard.QueryVariable(label)
            .label(label)
            .datasource(SOURCE)
            .query(query)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .current(models.VariableOption(text="All", value="$__all", selected=True))
        )
    for constant in constants:
        board.with_variable(constant.build())
    for row, panels in rows:
        board.with_row(dashboard.Row(row))
        for panel in panels:
            board.with_panel(panel)
    return board


def text_of(board: dashboard.Dashboard) -> str:
    """Return the JSON of a dashboard."""
    return JSONEncoder(sort_keys=True, indent=1).encode(board.build()) + "\n"
