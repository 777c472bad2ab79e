"""Tests of benchmarks/relevance_question.py: scenes, asked cells, tokens in a box, and figures."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from fovea.evaluation.scenes import HELD_OUT_SEED
from fovea.relevance.realizing import Region, View
from relevance_question import (
    ALL,
    KINDS,
    LARGE,
    SMALL,
    TEXT,
    Pair,
    Reading,
    Result,
    asked_cells,
    best_percentile,
    body,
    inside,
    markdown,
    scenes,
    verdicts,
)


def test_every_scene_has_three_things_with_a_question_each() -> None:
    for image, things in scenes(HELD_OUT_SEED, 4):
        assert tuple(thing.kind for thing in things) == KINDS
        assert len({thing.box for thing in things}) == 3
        sides = {thing.kind: (thing.box[2] - thing.box[0]) * image.width for thing in things}
        assert sides[SMALL] <= 34 + 2 * 2 + 1 < sides[LARGE]
        for thing in things:
            left, top, right, bottom = thing.box
            assert 0 <= left < right <= 1
            assert 0 <= top < bottom <= 1


def test_asked_cells_are_those_with_at_least_half_of_the_largest_overlap() -> None:
    asked = asked_cells((0.25, 0.0, 0.625, 0.5), (2, 4))
    assert asked.tolist() == [[False, True, True, False], [False] * 4]
    asked = asked_cells((0.25, 0.0, 0.55, 0.5), (2, 4))  # the second cell has a fifth of the first one's
    assert asked.tolist() == [[False, True, False, False], [False] * 4]


def test_percentile_of_the_best_asked_cell() -> None:
    values = np.array([[0.1, 0.2], [0.3, 0.9], [0.9, 0.0]])
    asked = np.zeros((3, 2), bool)
    asked[1] = True
    assert best_percentile(values, asked) == pytest.approx(90)  # four lower ones, and half of an equal one
    assert best_percentile(np.zeros((3, 2)), asked) == 50


def test_tokens_that_show_an_asked_cell() -> None:
    asked = np.zeros((8, 8), bool)
    asked[5, 3] = True
    native = View(Region(4, 2, 2, 4), (2, 4), tuple(range(8)))
    assert inside(native, asked) == 1
    assert inside(View(native.region, (2, 4), (0, 1, 2, 3, 4, 6, 7)), asked) == 0
    assert inside(View(native.region, (1, 2), (0, 1)), asked) == 1
    assert inside(View(native.region, (1, 3), (0, 1, 2)), asked) == 2  # its columns are 1.33 cells wide
    assert inside(View(Region(0, 0, 4, 8), (4, 8), tuple(range(32))), asked) == 0


def result_of(own: int, unrelated: int, scenes: int = 40) -> Result:
    """A result with the same figures in each scene. own, unrelated: tokens of 100 that lie in the box."""
    readings = Reading(99.0, 100.0, 100, own), Reading(50.0, 90.0, 100, unrelated)
    return Result(0.1, tuple(Pair(scene, kind, *readings) for scene in range(scenes) for kind in KINDS))


def test_figures_and_targets() -> None:
    result = result_of(own=20, unrelated=10)
    ratio = result.ratio(ALL)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))
    assert result.mean(TEXT, lambda pair: pair.own.participatory).value == 99
    assert result.without_token(ALL, lambda pair: pair.own) == (0, 120)
    assert [one.met for one in verdicts([result])] == [True, True]
    assert [one.met for one in verdicts([result_of(own=19, unrelated=10)])] == [False, True]
    assert [one.met for one in verdicts([result_of(own=0, unrelated=10)])] == [False, False]


def test_an_unrelated_question_may_give_nothing() -> None:
    result = result_of(own=20, unrelated=0)
    assert math.isinf(result.ratio(ALL).value)
    [figures] = body([result])
    assert figures["kinds"][ALL]["ratio"] is None
    assert figures["kinds"][SMALL]["unrelated"] == {
        "participatory": 50.0, "relevance": 90.0, "share": 0.0, "without_token": 40, "questions": 40,
    }  # fmt: skip


def test_the_interval_is_over_scenes() -> None:
    pairs = [
        Pair(scene, TEXT, Reading(0, 0, 10, scene % 2 * 10), Reading(0, 0, 10, 5)) for scene in range(100)
    ]
    share = Result(0.1, tuple(pairs)).mean(TEXT, lambda pair: pair.own.share)
    assert share.value == 0.5
    assert 0.38 < share.low < 0.44
    assert 0.56 < share.high < 0.62


def test_the_section_has_a_row_for_each_kind_and_question() -> None:
    text = markdown([result_of(20, 10)])
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 2 * 4
    assert "0 of 120 (0.0 - 3.1%)" in rows[-2]
