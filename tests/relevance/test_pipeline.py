"""From pixels and a question to a layout, and what is told about it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fovea.relevance.balancing import Balancer
from fovea.relevance.pipeline import realize, survey
from tests.relevance.pictures import CELL, picture, touched

SMALL, LARGE = 320, 896


def page(side: int) -> np.ndarray:
    pixels = np.full((side, side, 3), 240, np.uint8)
    pixels[40:60:3, 50:200] = 20
    pixels[side - 90 : side - 50, side - 120 : side - 60] = (220, 40, 30)
    return pixels


@pytest.mark.parametrize("side", [SMALL, LARGE])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.25, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("cell", [28, 32])
def test_the_layout_begins_with_the_view_that_was_seen_first(side: int, share: float, cell: int) -> None:
    side -= side % cell
    seen = survey(page(side), cell)
    total = max(1, int(share * seen.grid[0] * seen.grid[1]))
    made = realize(seen, seen.asked("Where is the red thing?"), total, balancer=Balancer())
    assert made.attended.layout.views[0].shape == seen.first_view(total)
    assert made.attended.layout.tokens == total


@pytest.mark.parametrize("shape", [(512, 1824), (448, 1920), (1344, 896), (1792, 576)])
def test_so_it_does_for_long_and_high_images(shape: tuple[int, int]) -> None:
    pixels = np.full((*shape, 3), 240, np.uint8)
    pixels[100:130, 60:200:4] = 0
    seen = survey(pixels, CELL)
    for total in range(1, seen.grid[0] * seen.grid[1], 37):
        made = realize(seen, seen.asked("Read the text"), total, balancer=Balancer())
        assert made.attended.layout.views[0].shape == seen.first_view(total)


def test_what_is_asked_for_is_shown_at_full_resolution() -> None:
    seen, scene = picture(("red", "star", 700, 650, 40), ("blue", "square", 120, 130, 60), side=896)
    pixels_of = survey(_pixels(scene), CELL)
    star = touched((scene.items[0].box,), seen.grid)
    made = realize(pixels_of, pixels_of.asked("Where is the red star?"), 160, balancer=Balancer())
    native = np.zeros(seen.grid, bool)
    for view in made.attended.layout.views:
        if view.native:
            for token in view.kept:
                row, column = divmod(token, view.shape[1])
                native[view.region.row + row, view.region.column + column] = True
    assert native[star].all()


def _pixels(scene: object) -> np.ndarray:
    from fovea.evaluation.scenes.draw import draw

    return np.asarray(draw(scene))


def test_load_shows_in_the_tensions() -> None:
    seen = survey(page(LARGE), CELL)
    asked = seen.asked("What is there?")
    calm, busy = (realize(seen, asked, 200, balancer=Balancer(), load=load) for load in (0.0, 1.0))
    assert calm.tensions.exploit < busy.tensions.exploit == 1
    assert calm.tensions.focus < busy.tensions.focus == 1


@pytest.mark.parametrize(("side", "cut"), [(SMALL, None), (SMALL, 4), (LARGE, None), (256, 8)])
def test_the_explanation_adds_up(side: int, cut: int | None) -> None:
    """Also of an image that is a thumbnail and a single region: its thumbnail was not counted once."""
    seen = survey(page(side), CELL)
    made = realize(seen, seen.asked("Read it"), 40, balancer=Balancer(), side=cut)
    told = json.loads(json.dumps(made.explanation()))
    assert told["tokens"] == 40
    assert told["thumbnail_tokens"] + sum(region["tokens"] for region in told["regions"]) == 40
    assert told["of"] == seen.grid[0] * seen.grid[1] == sum(region["of"] for region in told["regions"])
    assert told["grid"] == list(seen.grid)
    assert np.array(told["map"]) == pytest.approx(made.worth, abs=0.0051)
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
