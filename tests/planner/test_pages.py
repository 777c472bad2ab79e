"""The tables of the planner's pages are those that the code prints."""

from __future__ import annotations

from pathlib import Path

from tools.planner_pages import hardware_table, kv_sentence, precision_table, short_table, situation_rows

from tests.planner.documents.table import counts

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_of_devices() -> None:
    """The page leaves out the last column, the numbers of the sources."""
    table = hardware_table().partition("\n\n")[0].splitlines()
    rows = ["|".join(line.split("|")[:-2]) + "|" for line in table]
    assert "\n".join(rows) in (DOCS / "planner-hardware.md").read_text()


def test_the_table_of_what_runs_where() -> None:
    text = (DOCS / "planner-hardware.md").read_text()
    assert precision_table() in text
    assert kv_sentence() in text


def test_the_counts_of_judged_figures() -> None:
    assert counts() in (DOCS / "planner-figures.md").read_text()


def test_the_tables_of_situations() -> None:
    text = (DOCS / "engine-advisor.md").read_text()
    assert situation_rows() in text
    assert short_table() in text
