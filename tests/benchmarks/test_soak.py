"""Tests of benchmarks/soak.py: what counts as growth, and a short run of all its parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from soak import growth

BENCHMARK = Path(__file__).parents[2] / "benchmarks/soak.py"


def test_growth_is_that_of_the_second_half() -> None:
    steps = [float(number) for number in range(10)]
    assert growth(steps, [*range(0, 500, 100), *[500.0] * 5]) == (0.0, 0.0)
    assert growth(steps, [0.0] * 5 + [2.0 * number for number in range(5)]) == pytest.approx((2.0, 8.0))
    assert growth([], []) == growth([0.0, 1.0], [1.0, 2.0]) == (0.0, 0.0)


@pytest.mark.slow
def test_mixed_requests_leave_nothing_behind(tmp_path: Path) -> None:
    """Blocks, pixels and files of clients that left could stay behind, which a short run would show, too."""
    report_file = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARK), "--requests", "600", "--json", str(report_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    report = json.loads(report_file.read_text())
    assert (report["wrong"], report["held"]) == ({}, {}), done.stderr
    assert report["ends"]["left"] > 50
    assert report["ends"]["200"] > 200
