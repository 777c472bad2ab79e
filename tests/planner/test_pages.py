"""The tables of the planner's pages are those that the code prints."""

from __future__ import annotations

from pathlib import Path

from fovea.planner.hardware_table import markdown as hardware_tables

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_of_devices() -> None:
    assert hardware_tables() in (DOCS / "planner-hardware.md").read_text()
