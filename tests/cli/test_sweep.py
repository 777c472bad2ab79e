"""fovea eval --sweep: the same questions under every setting, counted, timed, drawn, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fovea.evaluation.pairs import PairedCounts
from fovea.evaluation.score import wilson
from fovea.evaluation.sweep import ALL, DETAILS, OTHERS
from tests.cli.support import Caller, Outcome, write_lines

SMALL = ("--timed", 1, "--max-tokens", 4, "--count", 2, "--shares", "0.5")


@pytest.fixture
def sweep(fovea: Caller, tiny: Path) -> Any:
    return lambda *words: fovea("eval", tiny, "--sweep", *SMALL, *words)


def body(said: Outcome) -> Any:
    assert said.code == 0, said.err
    return json.loads(said.out.splitlines()[-1])


def test_every_setting_is_asked_the_same(sweep: Any) -> None:
    found = body(sweep("--kinds", "colour,motion,small_object", "--methods", "uniform,relevance,resize"))
    assert (found["model"], found["seed"], found["failed"]) == ("tiny", 1_000_000_000, 0)
    names = [setting["name"] for setting in found["settings"]]
    assert names == ["full", "uniform 0.5", "relevance 0.5", "resize 0.5"]
    tokens = {}
    for setting in found["settings"]:
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


def test_settings_are_compared_in_pairs(sweep: Any) -> None:
    found = body(sweep("--kinds", "colour", "--methods", "random,relevance"))
    compared = [(one["first"], one["second"], one["group"]) for one in found["comparisons"]]
    assert compared == [
        ("random 0.5", "full", ALL), ("relevance 0.5", "full", ALL), ("relevance 0.5", "random 0.5", ALL),
    ]  # fmt: skip
    for one in found["comparisons"]:
        counts = (one["both"], one["only_first"], one["only_second"], one["neither"])
        assert sum(counts) == 2
        assert (one["low"], one["high"]) == PairedCounts(*counts).interval


def test_the_bundled_model_by_every_method(fovea: Caller, tmp_path: Path) -> None:
    """What a user gets without naming anything but how little is to be asked."""
    chart = tmp_path / "sweep.png"
    words = ("--sweep", "--count", 1, "--timed", 1, "--kinds", "colour", "--shares", "0.5", "--plot", chart)
    words += ("--max-pixels", 60_000)  # large pictures are timed as well
    said = fovea("eval", *words)
    found = body(said)
    assert [setting["method"] for setting in found["settings"]] == [
        None, "resize", "uniform", "random", "dart", "dart_query", "dpp", "dpp_query", "visionzip", "tome", "fastv",
        "relevance",
    ]  # fmt: skip
    assert found["settings"][0]["scores"][-1]["correct"] == 1
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "1 of 1 questions" in said.err
    assert said.out.startswith("| setting ")
    assert "Per kind, 0.5 of the tokens kept:" in said.out


def test_ones_own_questions(sweep: Any, folder: Path) -> None:
    data = write_lines(
        folder / "own.jsonl",
        {"image": "a.png", "question": "what?", "answer": "x"},
        {"image": "no.png", "question": "what?", "answer": "x"},
    )
    said = sweep("--data", data, "--methods", "dart", "--json")
    assert said.code == 1
    found = json.loads(said.out)
    assert (found["seed"], found["failed"], found["timed_on"]) == (None, 1, "the first 1 of the file")
    scores = [setting["scores"] for setting in found["settings"]]
    assert [[score["group"] for score in part] for part in scores] == [["other", ALL]] * 2
    assert [part[-1]["cases"] for part in scores] == [2, 2]


@pytest.mark.parametrize(
    ("words", "told"),
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
        (("--data", "x.jsonl", "--video"), "--video is of generated scenes"),
        (("--kinds", "colour", "--video"), "--video shows motion as a video; --kinds leaves it out"),
        (("--wrong",), "--wrong is for a single setting"),
    ],
)
def test_what_a_sweep_refuses(sweep: Any, words: tuple[str, ...], told: str) -> None:
    said = sweep(*words)
    assert said.code == 2
    assert told in said.told


@pytest.mark.parametrize("words", [("--methods", "dart"), ("--timed", 3), ("--plot", "x.png")])
def test_what_is_for_a_sweep_alone(fovea: Caller, tiny: Path, words: tuple[object, ...]) -> None:
    assert fovea("eval", tiny, *words).told.endswith(f"{words[0]} is for --sweep")
