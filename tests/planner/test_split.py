"""The planner's figures of encoders apart stand beside those of the simulator in docs/roles.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.planner_split import CASES, compare, markdown

PAGE = Path(__file__).parents[2] / "docs/roles.md"


@pytest.mark.slow
def test_formulas_and_simulator_agree_about_rates() -> None:
    for case in CASES:
        found = compare(case)
        assert found.split.requests_per_s == pytest.approx(found.per_s, rel=0.1)
        assert found.split.integrated_per_s == pytest.approx(found.integrated_per_s, rel=0.1)
        assert not found.split.recommended
    assert markdown() in PAGE.read_text(encoding="utf-8")
