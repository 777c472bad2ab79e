"""The dashboards: generated, readable, and complete by the list of what they have to show."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tools.dashboards.generate import stale

from fovea.deploy.monitoring.files import DASHBOARDS, dashboards
from tests.deploy.queries import panels

BOARDS = {name: json.loads(text) for name, text in dashboards().items()}
GROUPS = ["Request latency breakdown", "Throughput", "GPU utilization", "Error rate", "Cost"]


def test_generated_files_are_up_to_date() -> None:
    """Run `python -m tools.dashboards.generate` if this fails."""
    assert stale() == []


def test_stable_names() -> None:
    assert [BOARDS[f"{name}.json"]["uid"] for name in DASHBOARDS] == [f"fovea-{name}" for name in DASHBOARDS]


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_panels_can_be_read(name: str) -> None:
    board = BOARDS[name]
    assert board["description"]
    for panel in panels(board):
        title = panel["title"]
        assert len(panel["description"]) > 10, title
        assert panel["description"].endswith("."), title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        assert panel["datasource"]["uid"] == "${datasource}", title
        assert legend(panel), title
        for target in panel["targets"]:
            assert target["legendFormat"], title
            assert target["datasource"]["uid"] == "${datasource}", title


def legend(panel: Any) -> bool:
    """Whether a panel shows the names of its series."""
    options = panel["options"]
    if panel["type"] in ("timeseries", "heatmap"):
        shown = options["legend"]
        return bool(shown.get("showLegend", shown.get("show")))
    return panel["type"] == "gauge" or options["textMode"] == "value_and_name"


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_variables_choose_what_is_shown(name: str) -> None:
    variables = {each["name"]: each for each in BOARDS[name]["templating"]["list"]}
    expected = (
        {"datasource", "job", "slo"} if name == "slo.json" else {"datasource", "job", "model", "instance"}
    )
    assert expected <= set(variables)
    for each in expected - {"datasource"}:
        assert variables[each]["includeAll"]
        assert variables[each]["multi"]
    whole = json.dumps(BOARDS[name])
    for each in variables:
        assert f"${each}" in whole or f"${{{each}}}" in whole, f"${each} is not used"


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_panels_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(BOARDS[name]):
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_overview_has_the_five_groups() -> None:
    rows = [panel["title"] for panel in BOARDS["overview.json"]["panels"] if panel["type"] == "row"]
    assert rows == GROUPS
