"""The pages about monitoring: a section for each alert, commands that exist, and examples that run."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from tools.dashboards.outputs import ROOT

from fovea.cli.main import COMMANDS, build_parser
from tests.deploy.queries import alerts

RUNBOOKS = (ROOT / "docs/runbooks.md").read_text(encoding="utf-8")
MONITORING = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
QUESTIONS = ["Look", "Do"]


def sections() -> dict[str, str]:
    """Return the text below each third-level heading of the runbooks."""
    parts = re.split(r"^### (\w+)$", RUNBOOKS, flags=re.M)
    return dict(
        zip(parts[1::2], (re.split(r"^## ", part, flags=re.M)[0] for part in parts[2::2]), strict=True)
    )


def test_every_alert_has_its_runbook_and_no_other_has_one() -> None:
    assert sorted(sections()) == sorted(alert.name for alert in alerts())


@pytest.mark.parametrize("name", [alert.name for alert in alerts()])
def test_a_runbook_says_what_users_notice_where_to_look_and_what_to_do(name: str) -> None:
    section = sections()[name]
    assert section.strip().split("\n\n")[0].endswith((".", "**"))
    assert re.findall(r"^- \*\*([\w ]+):\*\*", section, flags=re.M) == QUESTIONS
    assert "`" in section.split("**Look:**")[1].split("**Do:**")[0], "no expression or command to look with"


def test_anchors_lead_to_headings() -> None:
    headings = {name.lower() for name in sections()}
    for alert in alerts():
        assert alert.anchor in headings


@pytest.mark.slow
def test_flags_of_the_pages_exist() -> None:
    parser = build_parser(*COMMANDS)
    known = {flag for action in actions(parser) for flag in action.option_strings}
    named = set(re.findall(r"`(--[a-z-]+)[ =`]", RUNBOOKS)) | set(
        re.findall(r"fovea [^`]*?(--[a-z-]+)", RUNBOOKS)
    )
    assert len(named) > 10
    assert named <= known


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return all options of a parser and its commands."""
    found: list[argparse.Action] = []
    for action in parser._actions:
        found.append(action)
        if isinstance(action, argparse._SubParsersAction):
            found += [each for child in action.choices.values() for each in actions(child)]
    return found


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", MONITORING, flags=re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/monitoring.md", "exec"), {})
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {
        "monitoring/prometheus.yml",
        "monitoring/alertmanager.yml",
        "monitoring/grafana/slo.json",
    } <= written
