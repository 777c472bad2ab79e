"""The pipeline from pixels and a question to a layout, and its explanation."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fovea.relevance.balancing import BUSYNESS, SHARPNESS, Balancer, Tensions, Ways, prior
from fovea.relevance.pipeline import Realization, Survey, realize, survey
from fovea.relevance.policy import Allocation, attend, content_mask, first_view
from fovea.relevance.realizing import SIDE
from fovea.relevance.texture import CHANNELS, Texture
from tests.relevance.pictures import CELL, cells_touching, picture
from tests.support.thorough import others_slow

SMALL, LARGE = 320, 896


def page(side: int) -> np.ndarray:
    pixels = np.full((side, side, 3), 240, np.uint8)
    pixels[40:60:3, 50:200] = 20
    pixels[side - 90 : side - 50, side - 120 : side - 60] = (220, 40, 30)
    return pixels


def realize_page(
    image_survey: Survey, question: str, total: int, compress: float | None = None, side: int = SIDE
) -> Realization:
    """Lay out an image like the engine does it for towers of any size. compress: None: the prior's."""
    balancer = Balancer()
    tensions = balancer.tensions(question, None, image_survey.statistics(total))
    if compress is not None:
        tensions = replace(tensions, compress=compress)
    return realize(
        image_survey,
        image_survey.keyword_map(question),
        total,
        tensions=tensions,
        balancer=balancer,
        choose=lambda relevance, content, total: attend(
            relevance, content, total, tensions.compress, side=side
        ),
    )


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
            image_survey.grid, total, realization.tensions.compress
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
        assert realization.allocation.layout.views[0].shape == first_view(image_survey.grid, total, compress)


def test_statistics_by_hand() -> None:
    """Four cells and two tokens: means, deviations, interpolated quantiles, and the budget."""
    channels = np.zeros((2, 2, len(CHANNELS)), np.float32)
    channels[:, :, CHANNELS.index("sobel")] = [[0, 0.1], [0.2, 0.3]]
    known = (np.array(values, np.float32) for values in ([[0, 1], [0.5, 0.5]], [[0, 0], [0, 1]]))
    image_survey = Survey(Texture(channels, np.zeros((8, 8), np.uint8), 4), *known)
    result = image_survey.statistics(2)
    expected = [0.5, 0.125**0.5, 0.25, 0.1875**0.5, 0.15, 0.27, 0.297, 0.1, 0.5, 0.2]
    assert result == pytest.approx(expected, abs=1e-6)
    assert result.dtype == np.float32
    assert (result[BUSYNESS], result[SHARPNESS]) == pytest.approx((0.5, 0.297))
    assert image_survey.statistics(1)[7:] == pytest.approx([0, 0.25, 0.2])


def test_statistics_distinguish_a_blank_picture_from_a_busy_one() -> None:
    blank, busy = (
        survey(pixels, CELL).statistics(50)
        for pixels in (np.full((SMALL, SMALL, 3), 200, np.uint8), page(SMALL))
    )
    assert not blank[:7].any()
    assert (busy[:7] > 0).all()
    assert prior("What is it?", blank).compress > prior("What is it?", busy).compress


def test_the_chooser_gets_relevance_content_and_the_total() -> None:
    image_survey = survey(page(SMALL), CELL)
    keyword_map = image_survey.keyword_map("Where is the red thing?")
    tensions, calls = Tensions(0.2, 0.7, 0.6), []

    def choose(relevance: np.ndarray, content: np.ndarray, total: int) -> Allocation:
        calls.append((relevance, content, total))
        return attend(relevance, content, total)

    realization = realize(
        image_survey, keyword_map, 33, tensions=tensions, balancer=Balancer(), choose=choose
    )
    [(relevance, content, total)] = calls
    ways = Ways(image_survey.propositional, image_survey.perspectival, keyword_map)
    assert total == 33
    assert np.array_equal(relevance, Balancer().balance(ways, tensions))
    assert np.array_equal(content, content_mask(ways.propositional, ways.perspectival))
    assert realization.relevance is relevance
    assert realization.tensions == tensions
    assert realization.allocation == attend(relevance, content, 33)


def test_the_item_of_the_question_is_kept_at_native_resolution() -> None:
    image_survey, scene = picture(("red", "star", 700, 650, 40), ("blue", "square", 120, 130, 60), side=896)
    pixels_of = survey(_pixels(scene), CELL)
    star = cells_touching((scene.items[0].box,), image_survey.grid)
    realization = realize_page(pixels_of, "Where is the red star?", 160)
    native = np.zeros(image_survey.grid, bool)
    for view in realization.allocation.layout.views:
        if view.native:
            for token in view.token_indices:
                row, column = divmod(token, view.shape[1])
                native[view.region.row + row, view.region.column + column] = True
    assert native[star].all()


def _pixels(scene: object) -> np.ndarray:
    from fovea.evaluation.scenes.draw import draw

    return np.asarray(draw(scene))


def test_load_changes_the_tensions() -> None:
    image_survey = survey(page(LARGE), CELL)
    keyword_map = image_survey.keyword_map("What is there?")
    tensions = Balancer().tensions("What is there?", None, image_survey.statistics(200))
    calm, busy = (
        realize(
            image_survey, keyword_map, 200, tensions=tensions.under(load), balancer=Balancer(), choose=attend
        )
        for load in (0.0, 1.0)
    )  # fmt: skip
    assert calm.tensions.exploit < busy.tensions.exploit == 1
    assert calm.tensions.focus < busy.tensions.focus == 1
    assert not np.array_equal(calm.relevance, busy.relevance)


@pytest.mark.parametrize("compress", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("side", "cut"), [(SMALL, SIDE), (LARGE, SIDE), (LARGE, 4), (512, 16)])
def test_the_explanation_adds_up(side: int, cut: int, compress: float) -> None:
    """Tokens and areas add up, also for a view of the whole beside a single region.

    In that case the tokens of the view of the whole were once left out.
    """
    image_survey = survey(page(side), CELL)
    realization = realize_page(image_survey, "Read it", 40, compress, cut)
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
    area = 0.0
    for region in explanation["regions"]:
        left, top, right, bottom = region["box"]
        assert 0 <= left < right <= 1
        assert 0 <= top < bottom <= 1
        area += (right - left) * (bottom - top)
        assert (region["lod"] > 0) == (region["tokens"] > 0)
        assert region["lod"] <= 1
        for name in ("propositional", "perspectival", "participatory", "relevance"):
            assert 0 <= region[name] <= 1
    assert area == pytest.approx(1, abs=2e-3)
    assert explanation["allocation_ms"] >= 0
