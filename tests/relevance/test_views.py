"""Which view comes first, and what each gets of a budget: exact, and the best one closely wherever that fits."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import numpy as np
from hypothesis import given
from PIL.Image import Resampling

from fovea.evaluation.scenes.dataset import content
from fovea.evaluation.scenes.draw import draw
from fovea.relevance.pipeline import Survey, survey
from fovea.relevance.views import GLANCES, Sizes, ViewBudgets, ViewScore, allot, rank, score_view


def sizes_of(*fulls: int) -> list[Sizes]:
    return [Sizes(full, tuple(min(full, most) for most in GLANCES)) for full in fulls]


def page(*colours: tuple[int, int, int], side: int = 256) -> Survey:
    """White, with a square of each colour and a line of strokes under it."""
    pixels = np.full((side, side, 3), 250, np.uint8)
    for number, colour in enumerate(colours):
        pixels[20:90, 20 + 80 * number : 80 + 80 * number] = colour
    return survey(pixels, 16)


RED, BLUE, GREY = (220, 30, 30), (30, 70, 220), (120, 120, 120)


def test_what_the_words_ask_for_comes_before_what_there_is() -> None:
    views = [page(RED), page(BLUE, GREY, BLUE), page()]
    order = {
        words: rank([-1] * 3, [score_view(view, words) for view in views], "abc")
        for words in ("the red one", "what?")
    }
    assert order["the red one"][0] == 0
    assert order["what?"] == [1, 0, 2]
    red = [score_view(view, "what is red?").keywords[0] for view in views]
    assert red[0] > 5
    assert max(red[1:]) < 1, "noise, which leaves the choice to what there is"
    assert rank([-1] * 2, [score_view(view, "what is red?") for view in views[1:]], "bc") == [0, 1]


def test_more_text_comes_first_where_text_is_asked_for() -> None:
    pixels = np.full((2, 256, 256, 3), 250, np.uint8)
    for line in range(24, 220, 24):
        pixels[0, line : line + 12 : 4, 20:230:6] = 20
    pixels[1, 40:200, 20:230] = RED
    found = [score_view(survey(each, 16), "read the text") for each in pixels]
    assert found[0].keywords > found[1].keywords
    assert rank([-1] * 2, found, "ab") == [0, 1]


def test_among_scenes_text_is_mostly_found() -> None:
    """Two scenes without a question about text beside one with; the first of them by chance would be a third."""
    right = 0
    for index in range(15):
        kinds = ("reading", "shape", "counting")
        scenes = [content(kind, Random(f"{index}/{kind}"), (640, 640)) for kind in kinds]
        question = scenes[0][1][0].question
        views = [np.asarray(draw(shown).resize((320, 320), Resampling.BOX)) for (shown,), _, _ in scenes]
        scores = [score_view(survey(np.ascontiguousarray(view), 16), question) for view in views]
        right += rank([-1] * 3, scores, "abc")[0] == 0
    assert right >= 11


def test_things_that_are_asked_for_count_the_same() -> None:
    """Whatever their scales are: what counts is the share of the most that any view has; below one it is noise."""
    both, one, other, none = (
        ViewScore((40.0, 3.0), 0.1),
        ViewScore((50.0, 0.5), 0.2),
        ViewScore((0.2, 4.0), 0.9),
        ViewScore((0, 0), 1.0),
    )
    assert rank([-1] * 4, [none, other, one, both], "abcd") == [3, 2, 1, 0]
    faint = [ViewScore((0.01, 0.0), 0.1), ViewScore((0.0, 0.04), 0.2)]
    assert rank([-1] * 2, faint, "ab") == [1, 0]


def test_names_come_first_and_the_latest_of_them() -> None:
    plain = [ViewScore((), 0.5)] * 4
    assert rank([-1, -1, -1, -1], plain, "abcd") == [0, 1, 2, 3]
    assert rank([-1, 0, -1, 1], plain, "abcd") == [3, 1, 0, 2]
    assert rank([-1, -1, 0, -1], [ViewScore((), content) for content in (0.1, 0.9, 0.0, 0.2)], "abcd") == [
        2,
        1,
        3,
        0,
    ]


def test_the_second_of_two_identical_views_comes_last() -> None:
    scores = [ViewScore((), content) for content in (0.9, 0.9, 0.1, 0.0)]
    assert rank([-1] * 4, scores, "aabc") == [0, 2, 3, 1]
    assert rank([-1, 0, -1, -1], scores, "aabc") == [1, 2, 3, 0]
    assert rank([0, 0, -1, -1], scores, "aabc") == [0, 1, 2, 3], "both are named"


@st.composite
def budgets(draw: st.DrawFn) -> tuple[list[Sizes], list[int], int, int]:
    fulls = draw(st.lists(st.integers(1, 300), min_size=1, max_size=8))
    sizes = [
        Sizes(full, (g := draw(st.integers(1, min(full, 16))), draw(st.integers(1, min(g, 4))), 1))
        for full in fulls
    ]
    order = draw(st.permutations(range(len(fulls))))
    total = draw(st.integers(len(fulls), max(len(fulls), sum(fulls))))
    return sizes, order, draw(st.integers(1, len(fulls))), total


def tokens(sizes: list[Sizes], found: ViewBudgets) -> list[int]:
    return [found.close.get(view, size.glances[found.glance]) for view, size in enumerate(sizes)]


@given(budgets())
def test_a_budget_is_met_and_never_exceeded(given: tuple[list[Sizes], list[int], int, int]) -> None:
    sizes, order, wanted, total = given
    found = allot(sizes, order, wanted, total)
    each = tokens(sizes, found)
    assert sum(each) <= total
    assert all(size.glances[found.glance] <= one <= size.full for size, one in zip(sizes, each, strict=True))
    less = [view for view in order if each[view] < sizes[view].full]
    assert not less or sum(each) == total, "what is left over goes to the next one"
    assert all(view not in found.close for view in less[1:]), (
        "no view is seen more closely before a better one is"
    )
    for closely in (wanted, 1):
        if sum(sizes[view].full for view in order[:closely]) + len(order) - closely <= total:
            assert all(each[view] == sizes[view].full for view in order[:closely])
            break


def test_glances_are_as_large_as_what_is_wanted_allows() -> None:
    sizes = sizes_of(100, 100, 100, 100)
    assert tokens(sizes, allot(sizes, [1, 0, 2, 3], 1, 200)) == [68, 100, 16, 16]
    assert allot(sizes, [1, 0, 2, 3], 1, 148) == ViewBudgets(0, {1: 100})
    assert allot(sizes, [1, 0, 2, 3], 1, 147) == ViewBudgets(1, {1: 100, 0: 39})
    assert allot(sizes, [1, 0, 2, 3], 2, 210) == ViewBudgets(1, {1: 100, 0: 100, 2: 6})
    assert allot(sizes, [1, 0, 2, 3], 2, 202) == ViewBudgets(2, {1: 100, 0: 100})


def test_what_does_not_fit_is_as_large_as_the_budget_holds() -> None:
    sizes = sizes_of(600, 600)
    assert tokens(sizes, allot(sizes, [1, 0], 1, 600)) == [16, 584]
    assert tokens(sizes, allot(sizes, [1, 0], 1, 20)) == [4, 16]
    assert tokens(sizes, allot(sizes, [1, 0], 1, 2)) == [1, 1]
    mixed = sizes_of(100, 4)
    assert tokens(mixed, allot(mixed, [0, 1], 1, 17)) == [13, 4]
