"""The tables of the planner's pages are those that the code prints."""

from __future__ import annotations

from pathlib import Path

from fovea.planner.advice_table import markdown as advice_tables
from fovea.planner.advice_table import short_table, situation_rows
from fovea.planner.hardware_table import markdown as hardware_tables
from tests.planner.documents.table import counts

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_of_devices() -> None:
    assert hardware_tables() in (DOCS / "planner-hardware.md").read_text()


def test_the_counts_of_judged_figures() -> None:
    assert counts() in (DOCS / "planner-figures.md").read_text()


def test_the_tables_of_engines_and_rules() -> None:
    text = (DOCS / "engine-advisor.md").read_text()
    assert advice_tables() in text
    assert situation_rows() in text
    assert short_table() in text
