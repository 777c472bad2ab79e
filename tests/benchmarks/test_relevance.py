"""Tests of benchmarks/relevance.py: targets judged on invented results, the page, and a quick run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from fovea.core.types import StageTimings
from fovea.evaluation.sweep import FULL, MedianTimes, Outcome, Setting, Sweep
from relevance_page import Cost, body, report, verdicts
from tests.support import forks

BENCHMARK = Path(__file__).parents[2] / "benchmarks/relevance.py"
RESIZE, RELEVANCE = Setting("resize", 0.5), Setting("relevance", 0.5)
COST = Cost(survey=0.004, first_view=0.006, planning=0.002)


def timed(ttft: float, encode: float) -> MedianTimes:
    return MedianTimes.from_requests(
        [100], [StageTimings(preprocess=0.01, encode=encode, prefill=0.02, ttft=ttft)]
    )


def outcomes(full: int, resize: int, relevance: int, *, of: int = 200) -> list[Outcome]:
    """Outcomes of `of` questions about small details and of as many about colours.

    full, resize, relevance: how many of each are answered correctly under this setting; these are the first
        ones.
    """
    return [
        Outcome(kind, (place < full, place < resize, place < relevance), (100, 50, 50))
        for kind in ("small_text", "colour")
        for place in range(of)
    ]


def sweep_of(*marks: Outcome) -> Sweep:
    times = timed(0.3, 0.2), timed(0.12, 0.08), timed(0.15, 0.1)
    return Sweep((FULL, RESIZE, RELEVANCE), marks, times, "scenes of a test")


def met(sweep: Sweep, cost: Cost = COST) -> dict[str, bool | None]:
    return {verdict.target: verdict.met for verdict in verdicts(sweep, cost)}


def met_with(verdict: dict[str, bool | None], *words: str) -> bool | None:
    """Whether the one target whose text has all these words is met."""
    [answer] = [value for target, value in verdict.items() if all(word in target for word in words)]
    return answer


def test_targets_that_are_met() -> None:
    verdict = met(sweep_of(*outcomes(full=190, resize=120, relevance=188)))
    assert met_with(verdict, "relevance 0.5, all questions") is True
    assert met_with(verdict, "relevance 0.5", "than resize") is True
    assert met_with(verdict, "of the saved encoder time") is True
    assert met_with(verdict, "first token at least 1.5x") is True


def test_targets_that_are_missed() -> None:
    """Relevance has three right answers of 200 fewer than full, and is within the interval of resize.

    The decision takes 16 ms of 100 saved ones, more than 15%. The first token is twice as fast, so that
    target is met.
    """
    verdict = met(sweep_of(*outcomes(full=190, resize=185, relevance=187)), replace(COST, planning=0.012))
    assert met_with(verdict, "relevance 0.5, all questions") is False
    assert met_with(verdict, "relevance 0.5", "than resize") is False
    assert met_with(verdict, "of the saved encoder time") is False
    assert met_with(verdict, "first token at least 1.5x") is True


def test_a_setting_that_is_worse_on_the_other_questions_does_not_win() -> None:
    marks = (
        outcomes(full=190, resize=100, relevance=180)[:200]
        + outcomes(full=190, resize=180, relevance=150)[200:]
    )
    assert met_with(met(sweep_of(*marks)), "relevance 0.5", "than resize") is False


def test_without_saved_time_the_target_is_missed() -> None:
    sweep = sweep_of(*outcomes(190, 185, 187))
    slow = replace(sweep, times=(timed(0.3, 0.2), timed(0.3, 0.2), timed(0.3, 0.25)))
    verdict = {one.target: one for one in verdicts(slow, COST)}
    [saved] = [one for target, one in verdict.items() if "saved encoder time" in target]
    assert (saved.met, saved.result) == (False, "nothing saved: -50.0 ms")
    assert met_with(met(slow), "first token at least 1.5x") is False


def test_targets_that_were_not_measured_have_no_verdict() -> None:
    verdict = met(sweep_of(*outcomes(190, 185, 187)))
    assert met_with(verdict, "relevance 0.25", "than dart") is None
    assert met_with(verdict, "dpp 0.75, all questions") is None
    plain = Sweep((FULL,), (Outcome("colour", (True,), (9,)),), (timed(0.3, 0.2),), "scenes of a test")
    assert set(met(plain).values()) == {None}


def test_the_page_has_the_first_paragraph_the_targets_and_all_tables() -> None:
    sweep = sweep_of(*outcomes(190, 120, 188))
    text = report(sweep, COST, "On a machine.", "a/chart.png")
    assert text.startswith("On a machine.\n\n| target ")
    assert "| relevance 0.5, all questions: at most 1.0 points below full " in text
    assert "](a/chart.png)\n\n| setting " in text
    assert "survey 4.0 ms, first view 6.0 ms" in text
    assert "| relevance 0.5 | resize 0.5 |" in text
    written = json.loads(json.dumps(body(sweep, COST)))
    assert written["cost_ms"]["planning"] == 2
    assert [setting["name"] for setting in written["settings"]] == ["full", "resize 0.5", "relevance 0.5"]


@pytest.mark.slow
def test_a_quick_run_writes_all_three_files(tmp_path: Path) -> None:
    words = ("--quick", "--threads", "1", "--out", str(tmp_path))
    process = forks.script(BENCHMARK, *words, HF_HUB_OFFLINE="1")
    told = process.communicate()[1]
    assert process.returncode == 0, told
    result = json.loads((tmp_path / "relevance.json").read_text())
    assert result["settings"][0]["scores"][-1]["cases"] == 3
    assert {verdict["met"] for verdict in result["verdicts"]} > {None}
    assert (tmp_path / "relevance.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "relevance.md").read_text().startswith("# Fewer visual tokens, measured\n\n")
