"""Settings on the same questions: scores per kind and group, the pairs to compare, the JSON report."""

from __future__ import annotations

import json

import pytest

from fovea.core.media import AUTO
from fovea.core.types import StageTimings
from fovea.evaluation.score import PairedCounts, wilson
from fovea.evaluation.sweep import ALL, DETAILS, FULL, OTHERS, MedianTimes, Outcome, Setting, Sweep, settings

DART, RELEVANCE = Setting("dart", 0.5), Setting("relevance", 0.5)
TIMINGS = StageTimings(preprocess=0.01, encode=0.2, prefill=0.04, ttft=0.3)


def make_sweep(*outcomes: Outcome, settings: tuple[Setting, ...] = (FULL, DART, RELEVANCE)) -> Sweep:
    times = (MedianTimes.from_requests([100], [TIMINGS]),) * len(settings)
    return Sweep(settings, outcomes, times, "scenes of a test")


@pytest.fixture
def sweep() -> Sweep:
    return make_sweep(
        Outcome("small_text", (True, False, True), (800, 400, 400)),
        Outcome("colour", (True, True, True), (100, 50, 50)),
        Outcome("small_text", (True, False, False), (600, 300, 300)),
        Outcome("colour", (False, True, True), (200, 100, 100)),
    )


def test_all_tokens_come_first_and_there_are_no_duplicates() -> None:
    result = settings(("dart", "dart", "relevance"), (0.5, 0.25, 0.5))
    assert [one.name for one in result] == [
        "full", "dart 0.5", "dart 0.25", "relevance 0.5", "relevance 0.25",
    ]  # fmt: skip


def test_scores_of_kinds_and_groups(sweep: Sweep) -> None:
    assert sweep.kinds == ("small_text", "colour")
    assert sweep.groups == (DETAILS, OTHERS, ALL)
    details = sweep.score(DART, DETAILS)
    assert (details.cases, details.correct, details.accuracy, details.tokens) == (2, 0, 0.0, 350)
    assert (details.low, details.high) == wilson(0, 2)
    assert sweep.score(DART, "colour").correct == sweep.score(DART, OTHERS).correct == 2
    assert sweep.score(FULL).correct == 3
    assert sweep.score(FULL).tokens == 425


def test_if_no_question_is_about_small_details_there_is_one_group() -> None:
    assert make_sweep(Outcome("colour", (True,) * 3, (1,) * 3)).groups == (ALL,)


def test_settings_are_compared_question_by_question(sweep: Sweep) -> None:
    assert sweep.compare(RELEVANCE, DART, DETAILS).counts == PairedCounts(0, 1, 0, 1)
    assert sweep.compare(RELEVANCE, FULL).counts == PairedCounts(2, 1, 1, 0)


def test_relevance_is_compared_with_the_others_at_its_share() -> None:
    few = Setting("dart", 0.25)
    result = make_sweep(Outcome("colour", (True,) * 4, (1,) * 4), settings=(FULL, DART, few, RELEVANCE))
    assert result.pairs == ((DART, FULL), (few, FULL), (RELEVANCE, FULL), (RELEVANCE, DART))


def test_the_budget_auto_has_no_share_to_be_compared_at() -> None:
    auto = Setting("relevance", AUTO)
    result = make_sweep(Outcome("colour", (True,) * 4, (8, 4, 4, 2)), settings=(FULL, DART, RELEVANCE, auto))
    assert auto.name == "relevance auto"
    assert result.rivals(auto) == ()
    assert result.pairs == ((DART, FULL), (RELEVANCE, FULL), (auto, FULL), (RELEVANCE, DART))
    assert json.loads(json.dumps(result.body()))["settings"][-1]["keep"] == "auto"


def test_times_are_medians_and_compute_is_all_work_before_the_first_token() -> None:
    slow = StageTimings(preprocess=0.02, encode=0.3, prefill=0.05, ttft=0.5)
    slowest = StageTimings(preprocess=9, encode=9, prefill=9, ttft=9)
    result = MedianTimes.from_requests([10, 30, 20], [slowest, TIMINGS, slow])
    assert (result.requests, result.tokens, result.ttft) == (3, 20, 0.5)
    assert result.compute == pytest.approx(0.37)


def test_as_json(sweep: Sweep) -> None:
    body = json.loads(json.dumps(sweep.body()))
    assert [one["name"] for one in body["settings"]] == ["full", "dart 0.5", "relevance 0.5"]
    full = body["settings"][0]
    assert [score["group"] for score in full["scores"]] == ["small_text", "colour", DETAILS, OTHERS, ALL]
    assert full["scores"][-1]["accuracy"] == 0.75
    assert full["timed"] == {
        "requests": 1, "tokens": 100, "ttft_ms": 300, "preprocess_ms": 10, "encode_ms": 200, "prefill_ms": 40,
        "compute_ms": 250,
    }  # fmt: skip
    last = body["comparisons"][-1]
    assert (last["first"], last["second"], last["group"]) == ("relevance 0.5", "dart 0.5", ALL)
    counts = {name: last[name] for name in ("both", "only_first", "only_second", "neither")}
    assert counts == {"both": 2, "only_first": 1, "only_second": 0, "neither": 1}
    assert last["low"] <= last["difference"] == 0.25 <= last["high"]
