"""benchmarks/relevance.py: targets judged by pairs and times that were made up, what goes into a document, and a quick run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from fovea.core.types import StageTimings
from fovea.evaluation.sweep import FULL, MedianTimes, Outcome, Setting, Sweep
from relevance_page import BEGIN, END, Cost, body, measured, verdicts, written_into

BENCHMARK = Path(__file__).parents[2] / "benchmarks/relevance.py"
RESIZE, SEEN = Setting("resize", 0.5), Setting("relevance", 0.5)
COST = Cost(survey=0.004, first_view=0.006, planning=0.002)


def timed(ttft: float, encode: float) -> MedianTimes:
    return MedianTimes.from_requests([100], [StageTimings(preprocess=0.01, encode=encode, prefill=0.02, ttft=ttft)])


def answered(full: int, resize: int, seen: int, *, of: int = 200) -> list[Outcome]:
    """The first so many right, of small details and of colours each."""
    return [
        Outcome(kind, (place < full, place < resize, place < seen), (100, 50, 50))
        for kind in ("small_text", "colour")
        for place in range(of)
    ]


def found(*marks: Outcome) -> Sweep:
    times = timed(0.3, 0.2), timed(0.12, 0.08), timed(0.15, 0.1)
    return Sweep((FULL, RESIZE, SEEN), marks, times, "scenes of a test")


def met(sweep: Sweep, cost: Cost = COST) -> dict[str, bool | None]:
    return {verdict.target: verdict.met for verdict in verdicts(sweep, cost)}


def of(verdict: dict[str, bool | None], *words: str) -> bool | None:
    [answer] = [value for target, value in verdict.items() if all(word in target for word in words)]
    return answer


def test_targets_that_are_met() -> None:
    verdict = met(found(*answered(full=190, resize=120, seen=188)))
    assert of(verdict, "relevance 0.5, of all kinds") is True
    assert of(verdict, "relevance 0.5", "than resize") is True
    assert of(verdict, "of the encoder's time saved") is True
    assert of(verdict, "first token at least 1.5x") is True


def test_targets_that_are_missed() -> None:
    """Three of 200 fewer than full; no more than an interval above resize; 12 of 100 ms are within 15%, 16 are not; twice
    as fast is what was measured."""
    verdict = met(found(*answered(full=190, resize=185, seen=187)), replace(COST, planning=0.012))
    assert of(verdict, "relevance 0.5, of all kinds") is False
    assert of(verdict, "relevance 0.5", "than resize") is False
    assert of(verdict, "of the encoder's time saved") is False
    assert of(verdict, "first token at least 1.5x") is True


def test_worse_on_the_others_is_no_win() -> None:
    marks = answered(full=190, resize=100, seen=180)[:200] + answered(full=190, resize=180, seen=150)[200:]
    assert of(met(found(*marks)), "relevance 0.5", "than resize") is False


def test_nothing_saved_is_a_miss() -> None:
    sweep = found(*answered(190, 185, 187))
    slow = replace(sweep, times=(timed(0.3, 0.2), timed(0.3, 0.2), timed(0.3, 0.25)))
    verdict = {one.target: one for one in verdicts(slow, COST)}
    [saved] = [one for target, one in verdict.items() if "time saved" in target]
    assert (saved.met, saved.found) == (False, "nothing saved: -50.0 ms")
    assert of(met(slow), "first token at least 1.5x") is False


def test_what_was_left_out_is_not_judged() -> None:
    verdict = met(found(*answered(190, 185, 187)))
    assert of(verdict, "relevance 0.25", "than dart") is None
    assert of(verdict, "dpp 0.75, of all kinds") is None
    plain = Sweep((FULL,), (Outcome("colour", (True,), (9,)),), (timed(0.3, 0.2),), "scenes of a test")
    assert set(met(plain).values()) == {None}


def test_a_document_keeps_what_is_around_the_marks() -> None:
    text = f"# Seen\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    assert written_into(text, "new") == f"# Seen\n\n{BEGIN}\nnew\n{END}\n\nafter\n"
    with pytest.raises(ValueError, match="the document has no"):
        written_into("# Seen\n", "new")


def test_the_page_says_how_and_what() -> None:
    sweep = found(*answered(190, 120, 188))
    text = measured(sweep, COST, "On a machine.", "a/chart.png")
    assert text.startswith("On a machine.\n\n| target ")
    assert "| relevance 0.5, of all kinds: at most 1.0 points below full " in text
    assert "](a/chart.png)\n\n| setting " in text
    assert "survey 4.0 ms, first view 6.0 ms" in text
    assert "| relevance 0.5 | resize 0.5 |" in text
    written = json.loads(json.dumps(body(sweep, COST)))
    assert written["cost_ms"]["planning"] == 2
    assert [setting["name"] for setting in written["settings"]] == ["full", "resize 0.5", "relevance 0.5"]


def test_a_quick_run_writes_all_three_files_and_the_document(tmp_path: Path) -> None:
    page = tmp_path / "docs/page.md"
    page.parent.mkdir()
    page.write_text(f"before\n{BEGIN}\n{END}\n")
    subprocess.run(
        [
            sys.executable,
            str(BENCHMARK),
            "--quick",
            "--threads",
            "1",
            "--out",
            str(tmp_path),
            "--docs",
            str(page),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        check=True,
    )
    result = json.loads((tmp_path / "relevance.json").read_text())
    assert result["settings"][0]["scores"][-1]["cases"] == 3
    assert {verdict["met"] for verdict in result["verdicts"]} > {None}
    assert (tmp_path / "relevance.png").read_bytes().startswith(b"\x89PNG")
    written = (tmp_path / "relevance.md").read_text().removeprefix("# Fewer visual tokens, measured\n\n")
    assert page.read_text() == f"before\n{BEGIN}\n{written.replace('](', '](../')}{END}\n"
