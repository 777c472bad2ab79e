"""fovea eval --sweep: the same questions under every setting, scores, times, charts and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.cli.sweep import difference
from fovea.core.protocols import CACHE_STAGES
from fovea.evaluation.score import PairedCounts, wilson
from fovea.evaluation.sweep import ALL, DETAILS, OTHERS
from tests.cli.support import Caller, Outcome, write_lines

SMALL = ("--timed", 1, "--max-tokens", 4, "--count", 2, "--shares", "0.5")


@pytest.fixture
def sweep(fovea: Caller, tiny: Path) -> Any:
    return lambda *words: fovea("eval", tiny, "--sweep", *SMALL, *words)


def body(outcome: Outcome) -> Any:
    assert outcome.code == 0, outcome.err
    return outcome.json


def test_every_setting_gets_the_same_questions(sweep: Any) -> None:
    result = body(
        sweep("--json", "--kinds", "colour,motion,small_object", "--methods", "uniform,relevance,resize")
    )
    assert (result["model"], result["seed"], result["failed"]) == ("tiny", 1_000_000_000, 0)
    names = [setting["name"] for setting in result["settings"]]
    assert names == ["full", "uniform 0.5", "relevance 0.5", "resize 0.5"]
    tokens = {}
    for setting in result["settings"]:
        scores = {score["group"]: score for score in setting["scores"]}
        assert list(scores) == ["colour", "motion", "small_object", DETAILS, OTHERS, ALL]
        assert (scores[OTHERS]["cases"], scores[DETAILS]["cases"], scores[ALL]["cases"]) == (4, 2, 6)
        for score in scores.values():
            assert (score["low"], score["high"]) == wilson(score["correct"], score["cases"])
        tokens[setting["name"]] = scores["small_object"]["tokens"]
        timed = setting["timed"]
        assert timed["requests"] == 1
        assert timed["ttft_ms"] >= timed["encode_ms"] > 0
    assert tokens["full"] / 2 <= tokens["uniform 0.5"] == tokens["relevance 0.5"] < tokens["full"] / 2 + 1
    assert tokens["resize 0.5"] <= tokens["uniform 0.5"]


def test_every_timed_request_finds_all_caches_empty(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the cache of regions was left out. So `relevance` at a quarter was timed with the regions that it
    had encoded at a half, on the same image.
    """
    cleared: list[tuple[str, ...]] = []
    clear = Engine.clear_caches
    monkeypatch.setattr(
        Engine, "clear_caches", lambda self, *stages: (cleared.append(stages), clear(self, *stages))[1]
    )
    body(sweep("--json", "--kinds", "colour", "--methods", "relevance"))
    assert len(cleared) == 2 * 2  # two settings, each with a request before the timed one
    assert {frozenset(CACHE_STAGES) - set(stages) for stages in cleared} == {frozenset({"disk"})}


def test_settings_are_compared_in_pairs(sweep: Any) -> None:
    result = body(sweep("--json", "--kinds", "colour", "--methods", "random,relevance"))
    compared = [(one["first"], one["second"], one["group"]) for one in result["comparisons"]]
    assert compared == [
        ("random 0.5", "full", ALL), ("relevance 0.5", "full", ALL), ("relevance 0.5", "random 0.5", ALL),
    ]  # fmt: skip
    for one in result["comparisons"]:
        counts = (one["both"], one["only_first"], one["only_second"], one["neither"])
        assert sum(counts) == 2
        assert (one["low"], one["high"]) == PairedCounts(*counts).interval


def test_the_bundled_model_by_every_method(fovea: Caller, tmp_path: Path) -> None:
    """The default sweep, with few questions."""
    chart = tmp_path / "sweep.png"
    words = ("--sweep", "--count", 1, "--timed", 1, "--kinds", "colour", "--shares", "0.5", "--plot", chart)
    words += ("--max-pixels", 30_000)  # large images are timed, too
    outcome = fovea("eval", *words, "--json")
    result = body(outcome)
    assert [setting["method"] for setting in result["settings"]] == [
        None, "resize", "uniform", "random", "dart", "dart_query", "dpp", "dpp_query",
        "visionzip", "tome", "fastv", "relevance",
    ]  # fmt: skip
    assert result["settings"][0]["scores"][-1]["correct"] == 1
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "1 of 1 questions" in outcome.err


def test_tables(sweep: Any) -> None:
    """They fit the terminal; a page gets them as Markdown."""
    words = ("--kinds", "colour", "--methods", "uniform,random,dart,relevance,resize,tome")
    outcome = sweep(*words)
    assert outcome.code == 0
    assert outcome.out.startswith("setting ")
    assert "\nPer kind, 0.5 of the tokens kept:\n" in outcome.out
    assert "{" not in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert sweep(*words[:2], "--methods", "uniform", "--markdown").out.startswith("| setting ")


def test_questions_from_a_file(sweep: Any, folder: Path) -> None:
    data = write_lines(
        folder / "own.jsonl",
        {"image": "a.png", "question": "what?", "answer": "x"},
        {"image": "no.png", "question": "what?", "answer": "x"},
    )
    outcome = sweep("--data", data, "--methods", "dart", "--json")
    assert outcome.code == 1
    result = json.loads(outcome.out)
    assert (result["seed"], result["failed"], result["timed_on"]) == (None, 1, "the first 1 of the file")
    scores = [setting["scores"] for setting in result["settings"]]
    assert [[score["group"] for score in part] for part in scores] == [["other", ALL]] * 2
    assert [part[-1]["cases"] for part in scores] == [2, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--methods", "dart,magic"), "there is no method 'magic'; accepted: resize"),
        (("--shares", "0.5,2"), "--shares is '0.5,2'; accepted: numbers above 0, at most 1"),
        (("--shares", "half"), "--shares is 'half'; accepted"),
        (("--method", "dart"), "--method is for a single setting; --sweep takes --methods"),
        (("--budget", "0.5"), "--budget is for a single setting; --sweep takes --shares"),
        (("--seed", "7"), "--seed is 7; a sweep takes held-out scenes: accepted are 1000000000 and above"),
        (("--kinds", "magic"), "unknown kind 'magic'"),
        (("--plot", "chart.txt"), "accepted: a name that ends in .png"),
        (("--visual-tokens", "fast"), "--visual-tokens would falsify a sweep; leave it out"),
        (("--data", "x.jsonl", "--video"), "--video is for generated scenes"),
        (("--kinds", "colour", "--video"), "--video shows motion as a video; --kinds leaves it out"),
        (("--wrong",), "--wrong is for a single setting"),
    ],
)
def test_arguments_that_a_sweep_refuses(sweep: Any, words: tuple[str, ...], message: str) -> None:
    outcome = sweep(*words)
    assert outcome.code == 2
    assert message in outcome.error_line


@pytest.mark.parametrize("words", [("--methods", "dart"), ("--timed", 3), ("--plot", "x.png")])
def test_flags_that_need_a_sweep(fovea: Caller, tiny: Path, words: tuple[object, ...]) -> None:
    assert fovea("eval", tiny, *words).error_line.endswith(f"{words[0]} is for --sweep")


def test_a_p_value_is_never_shown_as_zero() -> None:
    """19 of 20 differing answers favour one setting: p is 0.00004, which three digits would show as 0.000."""
    assert difference(PairedCounts(70, 19, 1, 10)).endswith(", p < 0.001")
    assert difference(PairedCounts(70, 12, 8, 10)).endswith(", p 0.503")
