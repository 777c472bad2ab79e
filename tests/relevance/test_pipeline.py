"""The pipeline from pixels and a question to a layout, and its explanation."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fovea.relevance.balancing import Tensions, Ways, balance, spread_of, tensions_for
from fovea.relevance.knowing import participatory, readable_at
from fovea.relevance.pipeline import Realization, Survey, realize, survey, tensions
from fovea.relevance.policy import Allocation, Cells, attend, content_mask, first_view, look_shape
from fovea.relevance.realizing import SIDE
from tests.relevance.pictures import CELL, cells_touching, picture
from tests.support.thorough import others_slow

SMALL, LARGE = 320, 896
WHYS = {"asked about", "stands out", "much content"}


def page(side: int) -> np.ndarray:
    pixels = np.full((side, side, 3), 240, np.uint8)
    pixels[40:60:3, 50:200] = 20
    pixels[side - 90 : side - 50, side - 120 : side - 60] = (220, 40, 30)
    return pixels


def attention(image_survey: Survey, row: float, column: float) -> np.ndarray:
    """Attention of a look to one token of the view, at these shares of the image's sides."""
    shape = look_shape(image_survey.grid)
    asked = np.full(shape, 0.01, np.float32)
    asked[int(row * shape[0]), int(column * shape[1])] = 1
    return asked


def realize_page(
    image_survey: Survey,
    question: str,
    total: int,
    compress: float | None = None,
    side: int = SIDE,
    asked: np.ndarray | None = None,
) -> Realization:
    """Lay out an image like the engine does it for towers of any size. compress: None: the question's."""
    tension = tensions(question, image_survey, asked)
    if compress is not None:
        tension = replace(tension, compress=compress)
    return realize(
        image_survey, asked, total, tensions=tension,
        choose=lambda cells, total: attend(cells, total, tension.compress, side=side),
    )  # fmt: skip


@pytest.mark.parametrize("side", [SMALL, LARGE])
@pytest.mark.parametrize("share", others_slow([0.02, 0.1, 0.25, 0.5, 0.75, 0.99], [0.02, 0.25, 0.99]))
@pytest.mark.parametrize("cell", [28, 32])
def test_the_layout_begins_with_the_first_view(side: int, share: float, cell: int) -> None:
    side -= side % cell
    image_survey = survey(page(side), cell)
    total = max(1, int(share * image_survey.grid[0] * image_survey.grid[1]))
    for question in ("Where is the red thing?", "Read the text", "How many things are there?"):
        realization = realize_page(image_survey, question, total)
        assert realization.allocation.layout.views[0].shape == first_view(
            image_survey.grid, total, realization.tensions.compress, sum(realization.allocation.demands)
        )
        assert realization.allocation.layout.tokens == total


@pytest.mark.parametrize(
    "shape", others_slow([(512, 1824), (448, 1920), (1344, 896), (1792, 576)], [(512, 1824), (1344, 896)])
)
@pytest.mark.parametrize("compress", others_slow([0.15, 0.85, 0.95, 1.0], [0.15, 0.95, 1.0]))
def test_layouts_of_wide_and_high_images_begin_with_the_first_view(
    shape: tuple[int, int], compress: float
) -> None:
    pixels = np.full((*shape, 3), 240, np.uint8)
    pixels[100:130, 60:200:4] = 0
    image_survey = survey(pixels, CELL)
    for total in (2, 3, 4, *range(1, image_survey.grid[0] * image_survey.grid[1], 37)):
        realization = realize_page(image_survey, "Read the text", total, compress)
        demand = sum(realization.allocation.demands)
        shape = first_view(image_survey.grid, total, compress, demand)
        assert realization.allocation.layout.views[0].shape == shape


def test_tensions_follow_from_the_question_the_image_and_the_spread_of_the_look() -> None:
    image_survey = survey(page(SMALL), CELL)
    busyness = float(image_survey.propositional.mean())
    asked = attention(image_survey, 0.9, 0.7)
    for question in ("What is it?", "Count them"):
        assert tensions(question, image_survey, None) == tensions_for(question, busyness, None)
        expected = tensions_for(question, busyness, spread_of(asked))
        assert tensions(question, image_survey, asked) == expected
    assert tensions("", image_survey, asked).compress < tensions("", image_survey, None).compress
    even = np.ones_like(asked)
    assert tensions("", image_survey, even).compress > tensions("", image_survey, None).compress


@pytest.mark.parametrize("is_asked", [True, False])
def test_the_chooser_gets_the_maps_of_all_cells_and_the_total(is_asked: bool) -> None:
    image_survey = survey(page(SMALL), CELL)
    asked = attention(image_survey, 0.1, 0.2) if is_asked else None
    tension, calls = Tensions(0.2, 0.7, 0.6), []

    def choose(cells: Cells, total: int) -> Allocation:
        calls.append((cells, total))
        return attend(cells, total)

    realization = realize(image_survey, asked, 33, tensions=tension, choose=choose)
    [(cells, total)] = calls
    known = (
        np.zeros(image_survey.grid, np.float32)
        if asked is None
        else participatory(asked, image_survey.texture)
    )
    ways = Ways(image_survey.propositional, image_survey.perspectival, known)
    assert total == 33
    assert np.array_equal(cells.relevance, balance(ways, tension))
    assert np.array_equal(cells.content, content_mask(ways.propositional, ways.perspectival))
    assert np.array_equal(cells.asked, known)
    assert np.array_equal(cells.detail, readable_at(image_survey.texture))
    assert realization.relevance is cells.relevance
    assert realization.tensions == tension
    assert realization.looks == is_asked
    assert realization.allocation == attend(cells, 33)


def test_the_item_of_the_question_is_kept_at_native_resolution() -> None:
    image_survey, scene = picture(("red", "star", 700, 650, 40), ("blue", "square", 120, 130, 60), side=896)
    pixels_of = survey(_pixels(scene), CELL)
    star = cells_touching((scene.items[0].box,), image_survey.grid)
    asked = attention(pixels_of, 650 / 896, 700 / 896)
    realization = realize_page(pixels_of, "Where is the red star?", 160, asked=asked)
    native = np.zeros(image_survey.grid, bool)
    for view in realization.allocation.layout.views:
        if view.native:
            for token in view.token_indices:
                row, column = divmod(token, view.shape[1])
                native[view.region.row + row, view.region.column + column] = True
    content = content_mask(pixels_of.propositional, pixels_of.perspectival)
    assert (star & content).sum() >= 4
    assert native[star & content].all()
    assert realization.relevance[star].max() == 1


def _pixels(scene: object) -> np.ndarray:
    from fovea.evaluation.scenes.draw import draw

    return np.asarray(draw(scene))


def test_load_changes_the_tensions() -> None:
    image_survey = survey(page(LARGE), CELL)
    tension = tensions("What is there?", image_survey, None)
    calm, busy = (
        realize(image_survey, None, 200, tensions=tension.under(load), choose=attend) for load in (0.0, 1.0)
    )
    assert calm.tensions.exploit < busy.tensions.exploit == 1
    assert calm.tensions.focus < busy.tensions.focus == 1
    assert not np.array_equal(calm.relevance, busy.relevance)


@pytest.mark.parametrize("compress", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("side", "cut"), [(SMALL, SIDE), (LARGE, SIDE), (LARGE, 4), (512, 16)])
@pytest.mark.parametrize("is_asked", [True, False])
def test_the_explanation_adds_up(side: int, cut: int, compress: float, is_asked: bool) -> None:
    """Tokens and areas add up, also for a view of the whole beside a single region.

    In that case the tokens of the view of the whole were once left out.
    """
    image_survey = survey(page(side), CELL)
    asked = attention(image_survey, 0.95, 0.9) if is_asked else None
    realization = realize_page(image_survey, "Read it", 40, compress, cut, asked)
    explanation = json.loads(json.dumps(realization.explanation()))
    assert explanation["tokens"] == 40
    assert explanation["thumbnail_tokens"] + sum(region["tokens"] for region in explanation["regions"]) == 40
    assert (
        explanation["of"]
        == image_survey.grid[0] * image_survey.grid[1]
        == sum(region["of"] for region in explanation["regions"])
    )
    assert explanation["grid"] == list(image_survey.grid)
    assert np.array(explanation["map"]) == pytest.approx(realization.relevance, abs=0.0051)
    assert set(explanation["tensions"]) == {"compress_particularize", "exploit_explore", "focus_diversify"}
    assert explanation["looks"] == is_asked
    reasons = [region["why"] for region in explanation["regions"]]
    assert ("asked about" in reasons) is is_asked
    area = 0.0
    for region in explanation["regions"]:
        left, top, right, bottom = region["box"]
        assert 0 <= left < right <= 1
        assert 0 <= top < bottom <= 1
        area += (right - left) * (bottom - top)
        assert (region["lod"] > 0) == (region["tokens"] > 0)
        assert region["lod"] <= 1
        assert region["why"] in (WHYS if region["tokens"] else {""})
        for name in ("propositional", "perspectival", "participatory", "relevance"):
            assert 0 <= region[name] <= 1
    assert area == pytest.approx(1, abs=2e-3)
    assert explanation["allocation_ms"] >= 0
