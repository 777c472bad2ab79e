"""Tests of the part of benchmarks/relevance.py that is about pages: targets, tables and ablations."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import relevance_documents as documents
from fovea.core.types import StageTimings
from fovea.evaluation.sweep import FULL, MedianTimes, Outcome, Setting, Sweep
from fovea.relevance.balancing import Balancer, Tensions, Ways
from relevance_ablation import VARIANTS, Ablation, ablation_table, changed, focus_map
from relevance_documents import HALF, QUARTER, report, side_by_side, verdicts
from relevance_page import Cost, replace_between_marks
from tests.support import forks

BENCHMARK = Path(__file__).parents[2] / "benchmarks/relevance.py"

COST = Cost(survey=0.004, first_view=0.006, planning=0.002)
RESIZE = Setting("resize", 0.25)
ROWS = [
    Ablation("all of it", (0.5, 0.75, 1.0), (True, True, False)),
    Ablation("less", (0, 0, 0), (True, False, False)),
]


def timed(ttft: float) -> MedianTimes:
    return MedianTimes.from_requests(
        [100], [StageTimings(preprocess=0.01, encode=0.1, prefill=0.02, ttft=ttft)]
    )


def sweep_of(full: int, half: int, quarter: int, resize: int, *, of: int = 1000) -> Sweep:
    """Each number is how many of `of` questions are answered right with that setting, the first ones."""
    marks = (full, half, quarter, resize)
    outcomes = [Outcome("field", tuple(n < mark for mark in marks), (100, 50, 25, 25)) for n in range(of)]
    times = timed(0.9), timed(0.5), timed(0.29), timed(0.2)
    return Sweep((FULL, HALF, QUARTER, RESIZE), tuple(outcomes), times, "pages of a test")


def met_with(sweep: Sweep, *words: str) -> bool | None:
    [met] = [one.met for one in verdicts(sweep) if all(word in one.target for word in words)]
    return met


def test_targets_that_are_met() -> None:
    sweep = sweep_of(full=900, half=898, quarter=880, resize=700)
    assert met_with(sweep, "relevance 0.5: at most 0.5 points") is True
    assert met_with(sweep, "relevance 0.25: at most 3.0 points") is True
    assert met_with(sweep, "relevance 0.25 is better than resize") is True
    assert met_with(sweep, "first token at least 3x") is True


def test_targets_that_are_missed() -> None:
    sweep = replace(sweep_of(full=900, half=890, quarter=860, resize=859), times=(timed(0.5),) * 4)
    assert met_with(sweep, "relevance 0.5: at most 0.5 points") is False
    assert met_with(sweep, "relevance 0.25: at most 3.0 points") is False
    assert met_with(sweep, "relevance 0.25 is better than resize") is False
    assert met_with(sweep, "first token at least 3x") is False


def test_a_small_loss_whose_interval_excludes_zero_is_missed() -> None:
    """400 of 100,000 questions are lost: less than 0.5 points, but surely a loss."""
    sweep = sweep_of(full=90_000, half=89_600, quarter=90_000, resize=1, of=100_000)
    assert met_with(sweep, "relevance 0.5: at most 0.5 points") is False


def test_what_was_not_measured_has_no_verdict() -> None:
    sweep = sweep_of(900, 898, 880, 700)
    assert met_with(sweep, "relevance 0.5 is better than dpp") is None
    assert len(verdicts(sweep)) == 2 + 2 * 5 + 1


def test_scenes_and_pages_stand_side_by_side() -> None:
    sweep = sweep_of(900, 898, 880, 700)
    loss = {"first": "relevance 0.5", "second": "full", "difference": -0.01, "low": -0.02, "high": 0.0}
    scenes = {
        "settings": [{"name": "relevance 0.5", "scores": [{"accuracy": 0.93}], "timed": {"ttft_ms": 97.3}}],
        "comparisons": [loss | {"group": "others", "difference": 9}, loss | {"group": "all"}],
    }
    rows = {row[0]: row[1:] for row in side_by_side(sweep, scenes)}
    assert rows["relevance 0.5"][:3] == ["93.0", "-1.0 (-2.0 to +0.0)", "97"]
    assert rows["relevance 0.5"][3] == "89.8"
    assert rows["relevance 0.25"][:3] == ["-", "-", "-"]
    assert rows["full"][3:] == ["90.0", "-", "900"]


def test_the_report_has_all_parts_and_its_own_marks(tmp_path: Path) -> None:
    sweep = sweep_of(900, 898, 880, 700)
    text = report(sweep, COST, ROWS, "On a machine.", "a/chart.png", tmp_path / "none.json")
    assert text.startswith("On a machine.\n\n| target ")
    assert "](a/chart.png)\n\n| setting " in text
    assert "| less " in text
    json.dumps(documents.body(sweep, COST, ROWS))
    page = f"a\n<!-- measured by make bench-relevance -->\nx\n{documents.BEGIN}\nold\n{documents.END}\n"
    after = replace_between_marks(page, "new", (documents.BEGIN, documents.END))
    assert after == page.replace("old", "new")


def test_the_document_has_both_pairs_of_marks() -> None:
    text = (Path(__file__).parents[2] / "docs/relevance.md").read_text()
    assert text.index(documents.BEGIN) < text.index(documents.END)


def test_the_ablation_table_compares_with_its_first_row() -> None:
    lines = ablation_table(ROWS).splitlines()
    cells = [cell.strip() for cell in lines[2].split("|")]
    assert cells[1:7] == ["all of it", "50.0", "75.0", "100.0", "66.7", ""]
    assert "| -33.3 (" in lines[3]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name.replace(" ", "-"))
def test_a_variant_changes_what_its_name_says(variant) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(3)
    ways = Ways(*(rng.random((4, 5), np.float32) for _ in range(3)))
    image, usual = np.full(10, 0.5, np.float32), Balancer()
    tensions = usual.tensions("what is the total?", None, image)
    before = usual.balance(ways, tensions)
    with changed(variant):
        same_tensions = Balancer().tensions("what is the total?", None, image) == tensions
        same_map = np.array_equal(Balancer().balance(ways, tensions), before)
    assert same_tensions == ("fixed" not in variant.name)
    assert same_map == (variant.name == "all of it" or "fixed" in variant.name)
    assert np.array_equal(
        Balancer().balance(ways, Tensions(*(getattr(tensions, n) for n in tensions.__slots__))), before
    )


def test_the_focus_covers_every_cell_that_a_box_touches() -> None:
    focus = focus_map([(30, 0, 34, 10), (95, 63, 96, 64)], (1.0, 1.0), (3, 3), 32)
    assert focus.tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 0]]
    halved = focus_map([(60, 0, 68, 20)], (0.5, 0.5), (3, 3), 32)
    assert halved.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert focus_map([(200, 200, 210, 210)], (1.0, 1.0), (3, 3), 32)[2, 2] == 1


@pytest.mark.slow
def test_a_quick_run_on_pages_writes_all_three_files_and_the_document(tmp_path: Path) -> None:
    page = tmp_path / "docs/page.md"
    page.parent.mkdir()
    page.write_text(f"before\n{documents.BEGIN}\n{documents.END}\n")
    words = ("--documents", "--quick", "--threads", "1", "--out", str(tmp_path), "--docs", str(page))
    process = forks.script(BENCHMARK, *words, HF_HUB_OFFLINE="1")
    told = process.communicate()[1]
    assert process.returncode == 0, told
    result = json.loads((tmp_path / "relevance_documents.json").read_text())
    assert result["model"] == "fovea-page"
    assert result["settings"][0]["scores"][-1]["cases"] == 3
    assert [row["cases"] for row in result["ablations"]] == [2, 2]
    assert (tmp_path / "relevance_documents.png").read_bytes().startswith(b"\x89PNG")
    assert "| all of it " in page.read_text()
