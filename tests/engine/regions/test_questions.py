"""The bundled model looks at what a question is about: the map, the views, and what is encoded again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import PIL.Image
import pytest

from fovea import Engine
from fovea.core.media import PixelBudget, VisualTokens
from fovea.core.types import Completion
from fovea.engine.regions.any_size import AnySizeRegionEncoder
from fovea.evaluation.scenes.draw import draw, label_box
from fovea.evaluation.scenes.scene import COLOURS, Item, Label, Scene
from fovea.relevance.pipeline import Realization
from fovea.relevance.policy import ASKED, look_shape
from fovea.relevance.realizing import Region, whole
from tests.relevance.pictures import background, cells_touching
from tests.support.programs import need_kernels

pytestmark = pytest.mark.kernels

ITEMS = (("star", "red", 250, 200, 30), ("circle", "blue", 1050, 250, 60), ("square", "green", 300, 700, 60))
CODE = "KX27QA"
GRID = 28, 42
QUESTIONS = {
    "What does the small text say?": "text",
    "What is written here?": "text",
    "What color is the star?": "red",
    "What shape is the blue thing?": "blue",
    "What shape is the green item?": "green",
}
"""Questions, and the thing in the scene that each is about."""
FEW, MANY = 0.06, 0.25
"""Shares of the tokens: for little more than the asked thing, and for all things of the scene."""


@cache
def scene() -> Scene:
    """Four things far from each other on 1344x896 pixels, the smallest about as large as a token's cell."""
    items = tuple(Item(shape, name, 0, x, y, size, COLOURS[name]) for shape, name, x, y, size in ITEMS)
    label = Label(CODE, 0, "DejaVuSans", 16, 1000, 700, 1.0, (30, 30, 30))
    return Scene(1344, 896, background(), items, (label,))


@cache
def image() -> PIL.Image.Image:
    return draw(scene())


def cells_of(thing: str) -> np.ndarray:
    boxes = {item.colour: item.box for item in scene().items} | {"text": label_box(scene().labels[0])}
    return cells_touching((boxes[thing],), GRID)


@pytest.fixture(scope="module")
def machine() -> Iterator[Engine]:
    need_kernels()
    with Engine.from_pretrained("fovea-tiny", kv_cache_mib=32, threads=1) as machine:
        yield machine


def ask(machine: Engine, question: str, keep: float) -> tuple[Completion, Realization]:
    budget = PixelBudget(visual=VisualTokens("relevance", keep=keep, explain=True))
    request = machine.request(question, [image()], budget=budget, max_tokens=12, temperature=0, logprobs=True)
    answer = machine.generate(request.prompt, sampling=request.sampling)
    (planned,) = machine.parts.preparer.builder.build(request.prompt).images
    realization = machine.parts.intake.find_realization(planned.key)
    assert realization is not None
    return answer, realization


def forget(machine: Engine) -> None:
    """Empty all caches, and forget all layouts."""
    machine.clear_caches()
    encoder = machine.runner._encoder._encode.__self__._region_encoder  # type: ignore[attr-defined]
    assert isinstance(encoder, AnySizeRegionEncoder)
    encoder._relevance._realizations.clear()


@pytest.mark.parametrize(("question", "thing"), QUESTIONS.items())
def test_the_map_peaks_on_the_asked_thing(machine: Engine, question: str, thing: str) -> None:
    """Or beside it, because a token of the view that the model looks at is about 2x2 cells."""
    _, realization = ask(machine, question, MANY)
    assert realization.relevance.shape == GRID
    row, column = np.unravel_index(realization.relevance.argmax(), GRID)
    assert cells_of(thing)[row - 1 : row + 2, column - 1 : column + 2].any()
    about = realization.ways.participatory
    others = [about[cells_of(other)].max() for other in {*QUESTIONS.values()} - {thing}]
    assert about[cells_of(thing)].max() > ASKED
    assert max(others) < ASKED
    assert realization.looks == 1
    assert realization.tensions.compress < 0.5, "it looks at one place"


@pytest.mark.parametrize("keep", [FEW, MANY])
def test_the_asked_thing_is_shown_at_native_resolution(machine: Engine, keep: float) -> None:
    for question, thing in QUESTIONS.items():
        answer, realization = ask(machine, question, keep)
        assert answer.usage.image == round(keep * GRID[0] * GRID[1] + 0.49)
        native = np.zeros(GRID, bool)
        for view in realization.allocation.layout.views:
            if view.native:
                native[view.region.cells] = True
        assert native[cells_of(thing)].all(), question


def test_the_answers_are_right_with_a_quarter_of_the_tokens(machine: Engine) -> None:
    for question, words in (("What does the small text say?", CODE), ("What color is the star?", "red")):
        assert words in ask(machine, question, MANY)[0].text


def test_different_questions_have_different_maps_and_equal_ones_the_same_bits(machine: Engine) -> None:
    """Whatever the caches hold: nothing, this question's results, or those of another question."""
    first, second, *_ = ("What does the small text say?", "What color is the star?")
    forget(machine)
    alone, realization = ask(machine, first, FEW)
    again, _ = ask(machine, first, FEW)
    other, different = ask(machine, second, FEW)
    assert not np.array_equal(realization.ways.participatory, different.ways.participatory)
    forget(machine)
    ask(machine, second, FEW)
    after, repeated = ask(machine, first, FEW)
    assert alone.logprobs == again.logprobs == after.logprobs
    assert other.logprobs != alone.logprobs
    assert repeated.allocation == realization.allocation
    assert np.array_equal(repeated.relevance, realization.relevance)


Views = set[tuple[Region, tuple[int, int]]]


def encoded(machine: Engine, question: str, keep: float) -> tuple[int, Views]:
    """Ask a question. Returns how many views were encoded, and all of its views, with that of the look."""
    before = machine.stats()
    _, realization = ask(machine, question, keep)
    after = machine.stats()
    misses, hits = (after[name] - before[name] for name in ("region_cache_misses", "region_cache_hits"))
    shown = realization.allocation.layout.views
    assert misses + hits == len(shown) + 1, "the look, and each view of the layout"
    views = {(view.region, view.shape) for view in shown} | {(whole(*GRID), look_shape(GRID))}
    return int(misses), views


def test_a_second_question_encodes_only_views_that_the_first_had_not(machine: Engine) -> None:
    """With room for all things both have the same views; with few tokens they share the view of the look."""
    forget(machine)
    misses, first = encoded(machine, "What does the small text say?", MANY)
    assert misses == len(first) > 2
    misses, second = encoded(machine, "What shape is the blue thing?", MANY)
    assert misses == len(second - first) == 0
    forget(machine)
    misses, first = encoded(machine, "What does the small text say?", FEW)
    assert misses == len(first)
    misses, second = encoded(machine, "What shape is the blue thing?", FEW)
    assert misses == len(second - first) > 0
    assert second & first
