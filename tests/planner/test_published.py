"""Published measurements of other engines: the table of docs/planner.md, and how far off predictions are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.planner_published import CASES, Published, markdown

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
IMPOSSIBLE = 149.5
"""A published first token that would take all of the peak rate: see docs/planner.md."""


def test_the_page_has_the_table() -> None:
    assert markdown() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model} {case.what} {case.value}")
def test_predictions_are_within_the_stated_factor(case: Published) -> None:
    factor = 2.5 if case.value == IMPOSSIBLE else 1.6
    assert 1 / factor <= case.predicted() / case.value <= factor
