"""From pixels and a question to a layout, and what is told about it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fovea.relevance.balancing import BUSYNESS, SHARPNESS, Balancer, Tensions, Ways, prior
from fovea.relevance.pipeline import Realization, Survey, realize, survey
from fovea.relevance.policy import Allocation, attend, content_mask, first_view
from fovea.relevance.regions import SIDE
from fovea.relevance.texture import CHANNELS, Texture
from tests.relevance.pictures import CELL, picture, touched

SMALL, LARGE = 320, 896


def page(side: int) -> np.ndarray:
    pixels = np.full((side, side, 3), 240, np.uint8)
    pixels[40:60:3, 50:200] = 20
    pixels[side - 90 : side - 50, side - 120 : side - 60] = (220, 40, 30)
    return pixels


def shown(seen: Survey, question: str, total: int, compress: float | None = None, side: int = SIDE) -> Realization:  # fmt: skip
    """As the engine does it for towers of any size. compress: None for the prior's."""
    balancer = Balancer()
    tensions = balancer.tensions(question, None, seen.statistics(total))
    if compress is not None:
        tensions = replace(tensions, compress=compress)
    return realize(
        seen,
        seen.keyword_map(question),
        total,
        tensions=tensions,
        balancer=balancer,
        choose=lambda worth, held, total: attend(worth, held, total, tensions.compress, side=side),
    )


@pytest.mark.parametrize("side", [SMALL, LARGE])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.25, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("cell", [28, 32])
def test_the_layout_begins_with_the_view_that_was_seen_first(side: int, share: float, cell: int) -> None:
    side -= side % cell
    seen = survey(page(side), cell)
    total = max(1, int(share * seen.grid[0] * seen.grid[1]))
    for question in ("Where is the red thing?", "Read the text", "How many things are there?"):
        made = shown(seen, question, total)
        assert made.allocation.layout.views[0].shape == first_view(seen.grid, total, made.tensions.compress)
        assert made.allocation.layout.tokens == total


@pytest.mark.parametrize("shape", [(512, 1824), (448, 1920), (1344, 896), (1792, 576)])
@pytest.mark.parametrize("compress", [0.15, 0.85, 0.95, 1.0])
def test_so_it_does_for_long_and_high_images(shape: tuple[int, int], compress: float) -> None:
    pixels = np.full((*shape, 3), 240, np.uint8)
    pixels[100:130, 60:200:4] = 0
    seen = survey(pixels, CELL)
    for total in (2, 3, 4, *range(1, seen.grid[0] * seen.grid[1], 37)):
        made = shown(seen, "Read the text", total, compress)
        assert made.allocation.layout.views[0].shape == first_view(seen.grid, total, compress)


def test_statistics_by_hand() -> None:
    """Of four cells with two tokens to give away: means and deviations, quantiles between their neighbours, and the budget."""
    channels = np.zeros((2, 2, len(CHANNELS)), np.float32)
    channels[:, :, CHANNELS.index("sobel")] = [[0, 0.1], [0.2, 0.3]]
    known = (np.array(values, np.float32) for values in ([[0, 1], [0.5, 0.5]], [[0, 0], [0, 1]]))
    seen = Survey(Texture(channels, np.zeros((8, 8), np.uint8), 4), *known)
    found = seen.statistics(2)
    expected = [0.5, 0.125**0.5, 0.25, 0.1875**0.5, 0.15, 0.27, 0.297, 0.1, 0.5, 0.2]
    assert found == pytest.approx(expected, abs=1e-6)
    assert found.dtype == np.float32
    assert (found[BUSYNESS], found[SHARPNESS]) == pytest.approx((0.5, 0.297))
    assert seen.statistics(1)[7:] == pytest.approx([0, 0.25, 0.2])


def test_statistics_tell_a_blank_picture_from_a_busy_one() -> None:
    blank, busy = (survey(pixels, CELL).statistics(50) for pixels in (np.full((SMALL, SMALL, 3), 200, np.uint8), page(SMALL)))  # fmt: skip
    assert not blank[:7].any()
    assert (busy[:7] > 0).all()
    assert prior("What is it?", blank).compress > prior("What is it?", busy).compress


def test_the_choice_is_made_of_relevance_content_and_the_total() -> None:
    seen = survey(page(SMALL), CELL)
    asked = seen.keyword_map("Where is the red thing?")
    tensions, calls = Tensions(0.2, 0.7, 0.6), []

    def choose(worth: np.ndarray, held: np.ndarray, total: int) -> Allocation:
        calls.append((worth, held, total))
        return attend(worth, held, total)

    made = realize(seen, asked, 33, tensions=tensions, balancer=Balancer(), choose=choose)
    [(worth, held, total)] = calls
    ways = Ways(seen.propositional, seen.perspectival, asked)
    assert total == 33
    assert np.array_equal(worth, Balancer().balance(ways, tensions))
    assert np.array_equal(held, content_mask(ways))
    assert made.relevance is worth
    assert made.tensions == tensions
    assert made.allocation == attend(worth, held, 33)


def test_what_is_asked_for_is_shown_at_full_resolution() -> None:
    seen, scene = picture(("red", "star", 700, 650, 40), ("blue", "square", 120, 130, 60), side=896)
    pixels_of = survey(_pixels(scene), CELL)
    star = touched((scene.items[0].box,), seen.grid)
    made = shown(pixels_of, "Where is the red star?", 160)
    native = np.zeros(seen.grid, bool)
    for view in made.allocation.layout.views:
        if view.native:
            for token in view.token_indices:
                row, column = divmod(token, view.shape[1])
                native[view.region.row + row, view.region.column + column] = True
    assert native[star].all()


def _pixels(scene: object) -> np.ndarray:
    from fovea.evaluation.scenes.draw import draw

    return np.asarray(draw(scene))


def test_load_shows_in_the_tensions() -> None:
    seen = survey(page(LARGE), CELL)
    asked = seen.keyword_map("What is there?")
    tensions = Balancer().tensions("What is there?", None, seen.statistics(200))
    calm, busy = (
        realize(
            seen, asked, 200, tensions=tensions.under(load), balancer=Balancer(), choose=attend
        )
        for load in (0.0, 1.0)
    )  # fmt: skip
    assert calm.tensions.exploit < busy.tensions.exploit == 1
    assert calm.tensions.focus < busy.tensions.focus == 1
    assert not np.array_equal(calm.relevance, busy.relevance)


@pytest.mark.parametrize("compress", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("side", "cut"), [(SMALL, SIDE), (LARGE, SIDE), (LARGE, 4), (512, 16)])
def test_the_explanation_adds_up(side: int, cut: int, compress: float) -> None:
    """Also of an image that is a view of the whole and a single region: its first view was not counted once."""
    seen = survey(page(side), CELL)
    made = shown(seen, "Read it", 40, compress, cut)
    told = json.loads(json.dumps(made.explanation()))
    assert told["tokens"] == 40
    assert told["thumbnail_tokens"] + sum(region["tokens"] for region in told["regions"]) == 40
    assert told["of"] == seen.grid[0] * seen.grid[1] == sum(region["of"] for region in told["regions"])
    assert told["grid"] == list(seen.grid)
    assert np.array(told["map"]) == pytest.approx(made.relevance, abs=0.0051)
    assert set(told["tensions"]) == {"compress_particularize", "exploit_explore", "focus_diversify"}
    area = 0.0
    for region in told["regions"]:
        left, top, right, bottom = region["box"]
        assert 0 <= left < right <= 1
        assert 0 <= top < bottom <= 1
        area += (right - left) * (bottom - top)
        assert (region["lod"] > 0) == (region["tokens"] > 0)
        assert region["lod"] <= 1
        for name in ("propositional", "perspectival", "participatory", "relevance"):
            assert 0 <= region[name] <= 1
    assert area == pytest.approx(1, abs=2e-3)
    assert told["allocation_ms"] >= 0
