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
from relevance_page import AUTOMATIC, Cost, Section, Verdict, body, report, verdicts
from tests.support import forks

BENCHMARK = Path(__file__).parents[2] / "benchmarks/relevance.py"
RESIZE, RELEVANCE = Setting("resize", 0.5), Setting("relevance", 0.5)
COST = Cost(survey=0.004, view=0.006, decoder=0.003, planning=0.002, reused=1.0)
TIMED_ON = "scenes of a test"


def timed(ttft: float, encode: float) -> MedianTimes:
    return MedianTimes.from_requests(
        [100], [StageTimings(preprocess=0.01, encode=encode, prefill=0.02, ttft=ttft)]
    )


def outcomes(full: int, resize: int, relevance: int, *, of: int = 400) -> list[Outcome]:
    """Outcomes of `of` questions about small details and of as many about colours.

    full, resize, relevance: how many of each are answered correctly under this setting; these are the first
        ones.
    """
    return [
        Outcome(kind, (place < full, place < resize, place < relevance), (100, 50, 50))
        for kind in ("small_text", "colour")
        for place in range(of)
    ]


def sweep_of(*marks: Outcome, settings: tuple[Setting, ...] = (FULL, RESIZE, RELEVANCE)) -> Sweep:
    times = timed(0.3, 0.2), timed(0.12, 0.08), timed(0.11, 0.1)
    return Sweep(settings, marks, times[: len(settings)], TIMED_ON)


def met(sweep: Sweep, cost: Cost = COST) -> dict[str, bool | None]:
    return {verdict.target: verdict.met for verdict in verdicts(sweep, cost)}


def met_with(verdict: dict[str, bool | None], *words: str) -> bool | None:
    """Whether the one target whose text has all these words is met."""
    [answer] = [value for target, value in verdict.items() if all(word in target for word in words)]
    return answer


def test_targets_that_are_met() -> None:
    verdict = met(sweep_of(*outcomes(full=380, resize=240, relevance=379)))
    assert met_with(verdict, "relevance 0.5, all questions") is True
    assert met_with(verdict, "relevance 0.5", "behind no other method") is True
    assert met_with(verdict, "encoder time that is saved") is True
    assert met_with(verdict, "first token at least 2.5x") is True


def test_targets_that_are_missed() -> None:
    """Relevance has four right answers of 400 fewer than full, and 16 fewer than resize.

    The decision takes 17 ms of 100 saved ones, more than 15%. The first token is 2.7 times as fast, so that
    target is met.
    """
    sweep = sweep_of(*outcomes(full=380, resize=392, relevance=376))
    verdict = met(sweep, replace(COST, planning=0.010))
    assert met_with(verdict, "relevance 0.5, all questions") is False
    assert met_with(verdict, "relevance 0.5", "behind no other method") is False
    assert met_with(verdict, "encoder time that is saved") is False
    assert met_with(verdict, "first token at least 2.5x") is True


def test_a_small_loss_beyond_the_interval_is_missed() -> None:
    """With many questions, even a loss of 0.2 points is not chance."""
    verdict = met(sweep_of(*outcomes(full=5000, resize=0, relevance=4990, of=5000)))
    assert met_with(verdict, "relevance 0.5, all questions") is False


@pytest.mark.parametrize(("reused", "share"), [(1.0, "9.0%"), (0.0, "15.0%"), (0.5, "12.0%")])
def test_a_view_that_the_decoder_gets_is_not_work_for_the_decision(reused: float, share: str) -> None:
    sweep = sweep_of(*outcomes(380, 370, 374))
    [cost] = [one for one in verdicts(sweep, replace(COST, reused=reused)) if "is saved" in one.target]
    assert cost.result.startswith(share)


def test_the_lead_over_another_method_needs_the_whole_interval() -> None:
    settings = FULL, Setting("dart", 0.25), Setting("relevance", 0.25)
    ahead = met(sweep_of(*outcomes(380, 300, 370), settings=settings))
    assert met_with(ahead, "relevance 0.25 is ahead of dart") is True
    assert met_with(ahead, "relevance 0.25, all questions: at least 92%") is True
    close = met(sweep_of(*outcomes(380, 366, 367), settings=settings))
    assert met_with(close, "relevance 0.25 is ahead of dart") is False
    assert met_with(close, "relevance 0.25, all questions: at least 92%") is False
    assert met_with(close, "relevance 0.25 is ahead of dpp") is None


def automatic(lost: int, details: int, others: int) -> dict[str, bool | None]:
    """The verdicts on 2,000 questions. lost: wrong answers of `auto` about colours that full has right.

    details, others: tokens of `auto` for small details and for colours; full has 100.
    """
    marks = [
        Outcome(kind, (True, kind == "small_text" or place >= lost), (100, tokens))
        for kind, tokens in (("small_text", details), ("colour", others))
        for place in range(1000)
    ]
    return met(sweep_of(*marks, settings=(FULL, AUTOMATIC)))


def test_the_budget_auto_has_to_save_tokens_without_a_loss() -> None:
    assert set(words(automatic(lost=0, details=30, others=80))) == {True}
    assert words(automatic(lost=0, details=50, others=60)) == (True, False)
    assert words(automatic(lost=0, details=30, others=100)) == (False, True)
    assert words(automatic(lost=3, details=30, others=80)) == (True, True)
    assert words(automatic(lost=5, details=30, others=80)) == (False, True)


def words(verdict: dict[str, bool | None]) -> tuple[bool | None, bool | None]:
    """The verdicts on `auto` over all questions and on small details."""
    return met_with(verdict, "auto, all questions"), met_with(verdict, "auto, small details")


def test_without_saved_time_the_target_is_missed() -> None:
    sweep = sweep_of(*outcomes(380, 370, 374))
    slow = replace(sweep, times=(timed(0.3, 0.2), timed(0.3, 0.2), timed(0.3, 0.25)))
    verdict = {one.target: one for one in verdicts(slow, COST)}
    [saved] = [one for target, one in verdict.items() if "encoder time that is saved" in target]
    assert (saved.met, saved.result) == (False, "nothing saved: -50.0 ms")
    assert met_with(met(slow), "first token at least 2.5x") is False


def test_targets_that_were_not_measured_have_no_verdict() -> None:
    verdict = met(sweep_of(*outcomes(380, 370, 374)))
    assert met_with(verdict, "relevance 0.25", "of dart") is None
    assert met_with(verdict, "auto, all questions") is None
    plain = Sweep((FULL,), (Outcome("colour", (True,), (9,)),), (timed(0.3, 0.2),), TIMED_ON)
    assert set(met(plain).values()) == {None}


def test_the_page_has_the_first_paragraph_the_targets_and_all_tables() -> None:
    sweep = sweep_of(*outcomes(380, 240, 376))
    other = Verdict("the question matters", "3x", True)
    text = report(sweep, COST, "On a machine.", "a/chart.png", [other], [Section("A part", "Its table.")])
    assert text.startswith("On a machine.\n\n| target ")
    assert "\n| the question matters " in text
    assert "\n\n## A part\n\nIts table.\n\n## " in text
    assert "| relevance 0.5, all questions: at most 0.3 points below full" in text
    assert "](a/chart.png)\n\n| setting " in text
    assert "| look: the encoder on the small view of the whole image         | 6.0 |" in text
    assert "| relevance 0.5 | resize 0.5 |" in text
    written = json.loads(json.dumps(body(sweep, COST, [other])))
    assert written["cost_ms"] == {"survey": 4, "view": 6, "decoder": 3, "planning": 2}
    assert written["verdicts"][0] == {"target": "the question matters", "found": "3x", "met": True}
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
    assert [one["name"] for one in result["settings"]][-2:] == ["relevance 0.1", "relevance auto"]
    assert [one["kinds"]["all"]["own"]["questions"] for one in result["question"]] == [6, 6]
    assert {one["variant"] for one in result["ablation"]} >= {"everything"}
    assert min(result["cost_ms"].values()) > 0
    assert (tmp_path / "relevance.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "relevance.md").read_text().startswith("# Fewer visual tokens, measured\n\n")
