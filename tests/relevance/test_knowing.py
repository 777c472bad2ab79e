"""The three ways of knowing, on pictures with known content."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fovea.evaluation.scenes.draw import label_box
from fovea.relevance import knowing
from fovea.relevance.knowing import (
    STROKE_NOISE,
    keyword_amounts,
    perspectival,
    propositional,
    stretch,
    text_like,
)
from fovea.relevance.policy import content_mask
from fovea.relevance.texture import Texture, texture
from tests.relevance.pictures import cells_touching, held_out_questions, picture, ranks
from tests.support.thorough import is_thorough

SCENES = 60 if is_thorough() else 25
"""Held-out scenes of each kind."""

SHAPES = [
    ("blue", "square", 90.0, 90.0, 60.0),
    ("blue", "circle", 400.0, 110.0, 70.0),
    ("green", "cross", 120.0, 400.0, 60.0),
]


def content_cells(image: Texture) -> np.ndarray:
    maps = propositional(image), perspectival(image)
    return content_mask(*maps)


def keywords(image: Texture, question: str) -> np.ndarray:
    """The highest amount in each cell of the things that key words name, scaled within the image."""
    return np.max([stretch(values, least) for values, least in keyword_amounts(image, question)], axis=0)


def noise(amplitude: int, grey: int, side: int = 448) -> Texture:
    deviations = np.random.default_rng(amplitude + grey).integers(-amplitude, amplitude + 1, (side, side, 1))
    return texture(np.clip(grey + deviations, 0, 255).astype(np.uint8).repeat(3, axis=2), 28)


def test_small_text_on_paper_has_the_most_content() -> None:
    image, scene = picture(text=("KX27QA", 200, 300, 30))
    inside = cells_touching((label_box(scene.labels[0]),), image.grid)
    values = propositional(image)
    assert values[inside].min() > 0.5
    assert values[~inside].max() == 0
    assert content_mask(values, values)[inside].all()


@pytest.mark.parametrize(
    "question", ["Read the text.", "What is written here?", "Which code is it?", "WHAT DOES IT SAY?"]
)
def test_questions_about_text_prefer_strokes_to_surfaces(question: str) -> None:
    image, scene = picture(*SHAPES, text=("KX27QA", 200, 300, 30))
    inside = cells_touching((label_box(scene.labels[0]),), image.grid)
    values = keywords(image, question)
    assert np.array_equal(values, stretch(text_like(image), STROKE_NOISE))
    flat = cells_touching(((400, 110, 401, 111),), image.grid)
    assert values[flat].max() == 0
    assert values[inside].mean() > 0.6
    assert values[inside].mean() > 3 * values[~inside].mean()


def test_the_red_star_among_blue_shapes() -> None:
    image, scene = picture(*SHAPES, ("red", "star", 380, 380, 80))
    star = cells_touching((scene.items[-1].box,), image.grid)
    values = keywords(image, "Where is the red star?")
    assert np.unravel_index(values.argmax(), values.shape) in list(zip(*np.nonzero(star), strict=True))
    assert values[~star].max() < 0.05
    blue = keywords(image, "Where is the blue circle?")
    assert blue[star].max() < 0.05
    assert blue[cells_touching((scene.items[1].box,), image.grid)].max() == 1


@pytest.mark.parametrize("colour", ["red", "green", "blue", "yellow", "orange", "purple", "pink", "cyan"])
def test_every_colour_is_found_by_its_name(colour: str) -> None:
    others = [name for name in ("red", "green", "blue", "yellow", "cyan") if name != colour][:3]
    places = [(100.0, 100.0), (400.0, 120.0), (110.0, 390.0)]
    items = [(name, "square", x, y, 70.0) for name, (x, y) in zip(others, places, strict=True)]
    image, scene = picture(*items, (colour, "square", 400, 400, 70))
    values = keywords(image, f"What shape is the {colour} thing?")
    *beside, own = (values[cells_touching((item.box,), image.grid)].mean() for item in scene.items)
    assert own > 0.3
    assert own > 1.5 * max(beside)


def test_black_is_dark_and_without_colour() -> None:
    pixels = np.full((256, 256, 3), 230, np.uint8)
    pixels[32:64, 32:64], pixels[128:160, 128:160] = 10, (60, 0, 90)
    values = keywords(texture(pixels, 32), "the black one")
    assert np.unravel_index(values.argmax(), values.shape) == (1, 1)
    assert values[4, 4] < values[1, 1]


def test_key_words_inside_other_words_have_no_effect() -> None:
    image, _ = picture(*SHAPES)
    for question in ("", "Is it scared?", "What is bluetooth?", "How essay?", "breadth"):
        assert keyword_amounts(image, question) == []
    assert len(keyword_amounts(image, "blue")) == 1


def test_each_key_word_has_its_own_amounts() -> None:
    image, _ = picture(*SHAPES, text=("KX27QA", 200, 300, 30))
    both = keyword_amounts(image, "Read the text next to the blue square.")
    (text, least), (blue, _) = both
    assert np.array_equal(text, text_like(image))
    assert least == STROKE_NOISE
    assert np.array_equal(blue, keyword_amounts(image, "blue")[0][0])


def test_a_single_cell_of_another_colour_stands_out() -> None:
    pixels = np.full((896, 896, 3), 245, np.uint8)
    pixels[280:308, 560:588] = (200, 30, 30)
    values = perspectival(texture(pixels, 28))
    assert values[10, 20] == values.max() == 1
    away = np.ones(values.shape, bool)
    away[6:15, 16:25] = False
    assert values[away].max() < 0.01


def test_a_pattern_that_is_everywhere_does_not_stand_out() -> None:
    """One plain cell in a field of stripes stands out, and the stripes do not."""
    pixels = np.full((448, 448, 3), 255, np.uint8)
    pixels[:, ::4] = 0
    pixels[196:224, 196:224] = 190
    values = perspectival(texture(pixels, 28))
    assert values[7, 7] == 1
    assert np.median(values) < 0.1


@pytest.mark.parametrize("grey", [0, 127, 128, 255])
def test_a_blank_image_has_no_content(grey: int) -> None:
    image = texture(np.full((448, 448, 3), grey, np.uint8), 28)
    assert not propositional(image).any()
    assert not perspectival(image).any()
    assert not content_cells(image).any()


@pytest.mark.parametrize("amplitude", [1, 3, 6, 10, 25, 60])
def test_even_noise_has_hardly_any_content(amplitude: int) -> None:
    """With fixed bins, noise around the border of two bins counted as content in half of all cells."""
    shares = [content_cells(noise(amplitude, grey)).mean() for grey in (60, 120, 127, 128, 129, 190)]
    assert max(shares) < 0.1
    assert np.mean(shares) < 0.06


def test_a_slow_gradient_has_no_content() -> None:
    ramp = np.linspace(210, 226, 448).round().astype(np.uint8)
    pixels = np.broadcast_to(ramp[:, None, None], (448, 448, 3)).copy()
    assert not content_cells(texture(pixels, 28)).any()


@pytest.mark.parametrize("grain", [0, 3, 10])
def test_faint_text_is_above_its_background(grain: int) -> None:
    """The text differs from the paper by 15 grey values, by 45 beside the strongest noise."""
    faint = 220 if grain < 10 else 190
    image, scene = picture(text=("KX27QA", 200, 300, faint), noise=grain)
    inside = cells_touching((label_box(scene.labels[0]),), image.grid)
    for values in (propositional(image), perspectival(image), stretch(text_like(image), STROKE_NOISE)):
        assert values[inside].mean() > values[~inside].mean() + 0.1
    assert content_cells(image)[inside].mean() > 0.7
    assert content_cells(image)[~inside].mean() < 0.2


def test_key_words_find_small_texts() -> None:
    """In held-out scenes, the cells with the answer rank above nearly all others."""
    places = [
        ranks(keywords(image, turn.question))[inside].mean()
        for image, turn, inside in held_out_questions("small_text", SCENES)
    ]
    assert np.mean(places) > 0.9
    assert np.median(places) > 0.93


def test_small_objects_stand_out() -> None:
    result = [
        (
            ranks(perspectival(image))[inside].mean(),
            content_cells(image)[inside].mean(),
            content_cells(image).mean(),
        )
        for image, _, inside in held_out_questions("small_object", SCENES)
    ]
    place, kept, share = np.mean(result, axis=0)
    assert place > 0.95
    assert kept > 0.9
    assert share < 0.2


def test_background_noise_is_not_content() -> None:
    """A third of the scenes have background noise, which must not cost tokens."""
    things = [("red", "star", 380.0, 380.0, 30.0), ("blue", "circle", 100.0, 90.0, 28.0)]
    plain, grainy = (content_cells(picture(*things, noise=amount)[0]).mean() for amount in (0, 8))
    assert plain > 0
    assert grainy < plain + 0.1


@pytest.mark.parametrize("cell", [14, 15, 28, 32])
def test_maps_are_between_zero_and_one(cell: int) -> None:
    pixels = np.random.default_rng(cell).integers(0, 256, (6 * cell, 7 * cell, 3), dtype=np.uint8)
    pixels[: 3 * cell] //= 4
    image = texture(pixels, cell)
    for values in (
        propositional(image),
        perspectival(image),
        stretch(text_like(image), STROKE_NOISE),
        keywords(image, "white, red"),
    ):
        assert values.shape == (6, 7)
        assert values.dtype == np.float32
        assert values.min() >= 0
        assert values.max() <= 1


@pytest.mark.parametrize("cell", [5, 8, 12])
def test_entropies_cell_by_cell(cell: int) -> None:
    pixels = np.random.default_rng(cell).integers(0, 256, (2 * cell, 3 * cell), dtype=np.uint8)
    pixels[:cell, :cell] = 90
    result = knowing.entropy_of_cells(pixels, cell)
    step = 2 if cell % 2 == 0 else 1
    for row in range(2):
        for column in range(3):
            inside = pixels[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell].astype(int)
            samples = (inside[::step, ::step] + inside[step - 1 :: step, step - 1 :: step]) // 2
            middle = math.floor(inside.mean() + 0.5)
            levels = [math.floor((value - middle + 8) / 16) for value in samples.ravel()]
            shares = [levels.count(level) / len(levels) for level in set(levels)]
            expected = -sum(share * math.log(share) for share in shares) / math.log(16)
            assert result[row, column] == pytest.approx(expected, abs=1e-5)
    assert result[0, 0] == 0


@pytest.mark.parametrize("cell", [8, 10])
def test_deviations_cell_by_cell(cell: int) -> None:
    """Deviations within and between 4x4 parts; a cell whose side is not a multiple of 4 is one part."""
    pixels = np.random.default_rng(cell).integers(0, 256, (2 * cell, 2 * cell), dtype=np.uint8)
    fine, coarse = knowing.deviations_of_cells(pixels, cell)
    cuts = 4 if cell % 4 == 0 else 1
    size = cell // cuts
    for row in range(2):
        for column in range(2):
            inside = pixels[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell] / 255
            parts = [
                inside[y * size : (y + 1) * size, x * size : (x + 1) * size]
                for y in range(cuts)
                for x in range(cuts)
            ]
            assert fine[row, column] == pytest.approx(math.sqrt(np.mean([p.var() for p in parts])), abs=1e-4)
            assert coarse[row, column] == pytest.approx(np.std([p.mean() for p in parts]), abs=1e-4)


@pytest.mark.parametrize("reach", [0, 1, 2, 4])
def test_means_of_surrounds_use_only_cells_inside_the_image(reach: int) -> None:
    values = np.random.default_rng(reach).random((5, 7, 2)).astype(np.float32)
    result = knowing.box_means(values, reach)
    for row in range(5):
        for column in range(7):
            part = values[max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1]
            assert result[row, column] == pytest.approx(part.mean(axis=(0, 1)), abs=1e-5)


def test_stretch() -> None:
    values = np.linspace(2, 3, 101).astype(np.float32)
    result = stretch(values)
    assert result[:21].max() == pytest.approx(0, abs=1e-5)
    assert result[98:].min() == pytest.approx(1, abs=1e-5)
    assert result[59] == pytest.approx(0.5, abs=1e-5)
    small = stretch(values / 1000)
    assert small.max() == pytest.approx(0.0008 / knowing.NOISE, rel=1e-3)
    assert stretch(values, grain=2).max() == pytest.approx(0.8 / (knowing.NOISE + 2 * 2.2), rel=1e-3)


def test_attention_that_is_not_a_number_counts_as_none() -> None:
    """A model whose states overflow gives NaN. Carrying it along lines never ended."""
    image = noise(200, 128)
    asked = np.full((7, 7), np.nan, np.float32)
    assert not knowing.participatory(asked, image).any()
    asked[2, 3] = 0.5
    known = knowing.participatory(asked, image)
    assert known.max() == 1
    assert np.isfinite(known).all()
