"""Tests of benchmarks/speculation.py: targets judged on invented results, the page, and a quick run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from oracle_drafts import chance_for
from speculation_page import draw, page, verdicts
from speculation_runs import (
    ALL_DRAFTERS,
    ALWAYS,
    OFF,
    Answer,
    Differs,
    Turn,
    check_equal,
    middle,
    of_medians,
    quotient,
    summary,
)
from tests.support import forks

BENCHMARK = Path(__file__).parents[2] / "benchmarks/speculation.py"
WHERE = {"machine": "2026-01-01 at abc: a CPU", "minutes": 2.0}
COUNTS = {"draft_tokens": 10.0, "accepted_draft_tokens": 5.0, "drafts_left_out": 1.0}


def answer(*, tokens: int, steps: int, first: float = 1.0, decode: float = 1.0, start: int = 0) -> Answer:
    ids = tuple(range(start, start + tokens))
    return Answer(ids, tuple(-float(place) for place in ids), first, decode, steps)


def turn(kind: str, name: str, *, steps: int, decode: float, first: float = 1.0) -> Turn:
    """Ten tokens after the first, in ten steps and one second without speculation."""
    off, other = answer(tokens=11, steps=10), answer(tokens=11, steps=steps, first=first, decode=decode)
    return Turn(kind, True, {OFF: [off], name: [other]})


def section(name: str, kind: str, *, steps: int, decode: float = 0.5, first: float = 1.0) -> dict[str, Any]:
    turns = [turn(kind, name, steps=steps, decode=decode, first=first)]
    names = [OFF, name]
    return {
        "model": "a model",
        "names": names,
        "kinds": summary(turns, names),
        "drafts": {name: COUNTS},
        **WHERE,
    }


def tiny(name: str, kind: str, **figures: Any) -> dict[str, Any]:
    made = section(name, kind, **figures)
    return {**made, "conversations": 1, "passes": 1, "earlier": 2800}


def large(speed: float, ratio: float) -> dict[str, Any]:
    cell = {"tokens_per_step": 1.8, "tokens_per_s": 10.0, "speed": quotient([(speed, 1.0)])._asdict()}
    return {
        "repeats": 1,
        "tokens": 96,
        "rows_ms": {OFF: 10.0, "4": 11.0},
        "one": [{"drafts": 3, "goal": 1.8, "off_tokens_per_s": 10.0, "budget": cell, "every": cell}],
        "planned": [
            {"drafts": 3, "acceptance": 0.5, "tokens_per_step": 1.8, "predicted": 1.5, "measured": speed}
        ],
        "crowd": {
            "streams": 8,
            "rates": {OFF: [10.0], "bad": [10.0 * ratio]},
            "ratio": of_medians([10.0 * ratio], [10.0])._asdict(),
            "drafts": 7.0,
        },
        **WHERE,
    }


def met(body: dict[str, Any], *words: str) -> bool | None:
    """Whether the one target whose text has all these words is met."""
    [found] = [one.met for one in verdicts(body) if all(word in one.target for word in words)]
    return found


def test_without_results_no_target_is_judged() -> None:
    assert {one.met for one in verdicts({})} == {None}
    assert page({}, "chart.png").count("Not measured here.") == 4


@pytest.mark.parametrize(("steps", "first", "good"), [(5, 1.01, True), (8, 1.03, False)])
def test_targets_of_the_bundled_model(steps: int, first: float, good: bool) -> None:
    body = {"tiny": tiny("auto", "colour", steps=steps, first=first)}
    assert met(body, "first token") is good
    assert met({"tiny": tiny(ALL_DRAFTERS, "colour", steps=steps)}, "all kinds") is good
    assert met(body, "reading") is None
    assert met({"tiny": tiny(ALWAYS, "reading", steps=steps)}, "reading") is good


def test_summaries_need_one_drafter_that_is_good_enough() -> None:
    assert met({"real": section("prompt", "summary", steps=6)}, "summaries") is True
    assert met({"real": section("answers", "summary", steps=7)}, "summaries") is False


@pytest.mark.parametrize(("speed", "ratio", "good"), [(1.36, 0.985, True), (1.34, 0.975, False)])
def test_targets_of_the_large_model(speed: float, ratio: float, good: bool) -> None:
    body = {"large": large(speed, ratio)}
    assert met(body, "0.5 B, one stream") is good
    assert met(body, "8 streams") is good


def test_a_step_that_decodes_gives_the_tokens_after_the_first() -> None:
    cell = section("auto", "colour", steps=4, decode=0.5)["kinds"]["all"]["auto"]
    assert cell["tokens_per_step"] == 2.5
    assert cell["speed"]["value"] == 2
    assert cell["tokens_per_s"] == 20


def test_an_answer_of_one_token_has_no_steps() -> None:
    alone = answer(tokens=1, steps=0, decode=0.0)
    found = summary([Turn("chat", True, {OFF: [alone], "auto": [alone]})], [OFF, "auto"])
    assert found["chat"]["auto"]["tokens_per_step"] == 1


@pytest.mark.parametrize("field", ["tokens", "logprobs"])
def test_an_answer_that_differs_ends_the_run(field: str) -> None:
    good = answer(tokens=3, steps=2)
    bad = good._replace(**{field: (*getattr(good, field)[:2], 7)})
    check_equal(Turn("chat", True, {OFF: [good, bad], "auto": [good, bad]}))
    with pytest.raises(Differs, match="chat, pass 1: .* of auto differ"):
        check_equal(Turn("chat", True, {OFF: [good, good], "auto": [good, bad]}))


def test_intervals_contain_their_value() -> None:
    for found in (quotient([(2, 1), (3, 1), (5, 2)]), middle([1.0, 1.1, 0.9]), of_medians([4, 5], [2, 2])):
        assert found.low <= found.value <= found.high


def test_a_chance_yields_the_wanted_tokens_per_step() -> None:
    chance = chance_for(1.8, 3)
    assert 1 + chance + chance**2 + chance**3 == pytest.approx(1.8)


def test_the_page_has_targets_and_all_sections(tmp_path: Path) -> None:
    body = {
        "tiny": tiny("auto", "colour", steps=5),
        "crowd": {
            "model": "a model", "questions": 8, "streams": 8, "repeats": 2, "drafts": COUNTS,
            "rates": {OFF: [9.0, 10.0], "auto": [11.0, 12.0]}, "ratio": middle([1.2])._asdict(), **WHERE,
        },
        "real": {**section("prompt", "summary", steps=5), "questions": 1, "answer": 120, "passes": 1},
        "large": large(1.4, 1.0),
    }  # fmt: skip
    text = page(json.loads(json.dumps(body)), "chart.png")
    assert text.startswith("# Speculation, measured\n\n")
    assert "Not measured here." not in text
    assert "| colour | 1       | 11.0        | 1.00 | 2.00 |" in text
    assert "| 3      | 0.50       | 1.80            | 1.50      | 1.40     | 1.07" in text
    draw(tmp_path / "chart.png", body)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_quick_run_writes_all_three_files(tmp_path: Path) -> None:
    words = ("--quick", "--only", "tiny,crowd,large", "--threads", "1", "--out", str(tmp_path))
    process = forks.script(BENCHMARK, *words, HF_HUB_OFFLINE="1")
    told = process.communicate()[1]
    assert process.returncode == 0, told
    result = json.loads((tmp_path / "speculation.json").read_text())
    assert {"tiny", "crowd", "large", "verdicts"} == result.keys()
    assert set(result["tiny"]["kinds"]) == {"colour", "reading", "all"}
    assert (tmp_path / "speculation.md").read_text().startswith("# Speculation, measured\n\n")
    assert (tmp_path / "speculation.png").read_bytes().startswith(b"\x89PNG")
