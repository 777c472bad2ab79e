"""Order and budgets of a request's images: the total is kept, and the best image is close if it fits."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import numpy as np
from hypothesis import given
from PIL.Image import Resampling

from fovea.evaluation.scenes.dataset import content
from fovea.evaluation.scenes.draw import draw
from fovea.relevance.images import GLANCES, Sizes, ViewBudgets, ViewScore, allot, rank, score_view
from fovea.relevance.pipeline import Survey, survey


def sizes_of(*fulls: int) -> list[Sizes]:
    return [Sizes(full, tuple(min(full, most) for most in GLANCES)) for full in fulls]


def page(*colours: tuple[int, int, int], side: int = 256) -> Survey:
    """A white image with a square of each colour."""
    pixels = np.full((side, side, 3), 250, np.uint8)
    for number, colour in enumerate(colours):
        pixels[20:90, 20 + 80 * number : 80 + 80 * number] = colour
    return survey(pixels, 16)


RED, BLUE, GREY = (220, 30, 30), (30, 70, 220), (120, 120, 120)


def test_images_with_the_named_thing_come_before_images_with_more_content() -> None:
    views = [page(RED), page(BLUE, GREY, BLUE), page()]
    order = {
        words: rank([-1] * 3, [score_view(view, words) for view in views], "abc")
        for words in ("the red one", "what?")
    }
    assert order["the red one"][0] == 0
    assert order["what?"] == [1, 0, 2]
    red = [score_view(view, "what is red?").keywords[0] for view in views]
    assert red[0] > 5
    assert max(red[1:]) < 1, "noise, so that the content decides"
    assert rank([-1] * 2, [score_view(view, "what is red?") for view in views[1:]], "bc") == [0, 1]


def test_the_image_with_more_text_comes_first_for_questions_about_text() -> None:
    pixels = np.full((2, 256, 256, 3), 250, np.uint8)
    for line in range(24, 220, 24):
        pixels[0, line : line + 12 : 4, 20:230:6] = 20
    pixels[1, 40:200, 20:230] = RED
    result = [score_view(survey(each, 16), "read the text") for each in pixels]
    assert result[0].keywords > result[1].keywords
    assert rank([-1] * 2, result, "ab") == [0, 1]


def test_the_scene_with_text_mostly_comes_first() -> None:
    """One of three scenes has text, and the question is about it. By chance it would be first in a third."""
    right = 0
    for index in range(15):
        kinds = ("reading", "shape", "counting")
        scenes = [content(kind, Random(f"{index}/{kind}"), (640, 640)) for kind in kinds]
        question = scenes[0][1][0].question
        views = [np.asarray(draw(shown).resize((320, 320), Resampling.BOX)) for (shown,), _, _ in scenes]
        scores = [score_view(survey(np.ascontiguousarray(view), 16), question) for view in views]
        right += rank([-1] * 3, scores, "abc")[0] == 0
    assert right >= 11


def test_all_named_things_have_equal_weight() -> None:
    """Their scales differ, so the share of the highest amount counts. An amount below 1 is noise."""
    both, one, other, none = (
        ViewScore((40.0, 3.0), 0.1),
        ViewScore((50.0, 0.5), 0.2),
        ViewScore((0.2, 4.0), 0.9),
        ViewScore((0, 0), 1.0),
    )
    assert rank([-1] * 4, [none, other, one, both], "abcd") == [3, 2, 1, 0]
    faint = [ViewScore((0.01, 0.0), 0.1), ViewScore((0.0, 0.04), 0.2)]
    assert rank([-1] * 2, faint, "ab") == [1, 0]


def test_named_images_come_first_and_among_them_the_last_named() -> None:
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


def tokens(sizes: list[Sizes], result: ViewBudgets) -> list[int]:
    return [result.close.get(view, size.glances[result.glance]) for view, size in enumerate(sizes)]


@given(budgets())
def test_a_budget_is_met_and_never_exceeded(given: tuple[list[Sizes], list[int], int, int]) -> None:
    sizes, order, wanted, total = given
    result = allot(sizes, order, wanted, total)
    each = tokens(sizes, result)
    assert sum(each) <= total
    assert all(size.glances[result.glance] <= one <= size.full for size, one in zip(sizes, each, strict=True))
    less = [view for view in order if each[view] < sizes[view].full]
    assert not less or sum(each) == total, "the remainder goes to the next image"
    assert all(view not in result.close for view in less[1:]), (
        "no image is encoded closely before a better one"
    )
    for close in (wanted, 1):
        if sum(sizes[view].full for view in order[:close]) + len(order) - close <= total:
            assert all(each[view] == sizes[view].full for view in order[:close])
            break


def test_glances_are_as_large_as_the_close_images_allow() -> None:
    sizes = sizes_of(100, 100, 100, 100)
    assert tokens(sizes, allot(sizes, [1, 0, 2, 3], 1, 200)) == [68, 100, 16, 16]
    assert allot(sizes, [1, 0, 2, 3], 1, 148) == ViewBudgets(0, {1: 100})
    assert allot(sizes, [1, 0, 2, 3], 1, 147) == ViewBudgets(1, {1: 100, 0: 39})
    assert allot(sizes, [1, 0, 2, 3], 2, 210) == ViewBudgets(1, {1: 100, 0: 100, 2: 6})
    assert allot(sizes, [1, 0, 2, 3], 2, 202) == ViewBudgets(2, {1: 100, 0: 100})


def test_an_image_that_does_not_fit_gets_all_of_the_remaining_budget() -> None:
    sizes = sizes_of(600, 600)
    assert tokens(sizes, allot(sizes, [1, 0], 1, 600)) == [16, 584]
    assert tokens(sizes, allot(sizes, [1, 0], 1, 20)) == [4, 16]
    assert tokens(sizes, allot(sizes, [1, 0], 1, 2)) == [1, 1]
    mixed = sizes_of(100, 4)
    assert tokens(mixed, allot(mixed, [0, 1], 1, 17)) == [13, 4]
