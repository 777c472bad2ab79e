"""The drawing of a division: numbers in the frames of regions, and a legend that says what they mean."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import pytest

from fovea.relevance.showing import (
    COLD,
    DIM,
    LEAST_FONT,
    LEAST_SIDE,
    LOWER,
    NATIVE,
    WARM,
    WARMTH,
    WHOLE_ONLY,
    _tint,
    show,
)  # fmt: skip

SIZE = 640, 480
ALL = 0.0, 0.0, 1.0, 1.0
HALVES = (0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0)
Box = tuple[float, float, float, float]


@dataclass
class Word:
    """Words of a drawing, their place in pixels, and their font's size."""

    text: str
    box: Box
    points: float


def region(
    box: Box,
    relevance: float = 0.5,
    tokens: int = 9,
    of: int = 9,
    lod: float = 1,
    why: str = "asked about",
) -> dict[str, Any]:
    found = {"relevance": relevance, "tokens": tokens, "of": of, "lod": lod, "why": why}
    return {"box": list(box), **found}


def explain(
    *regions: dict[str, Any], peak: tuple[int, int] = (0, 0), whole: int = 20, looks: int = 1
) -> dict[str, Any]:
    cells = np.zeros((15, 20))
    cells[peak] = 1.0
    return {
        "regions": list(regions),
        "map": cells.tolist(),
        "tokens": 100,
        "of": 300,
        "thumbnail_tokens": whole,
        "looks": looks,
        "tensions": {"compress_particularize": 0.15, "exploit_explore": 0.8, "focus_diversify": 0.84},
    }


def raster(columns: int, rows: int) -> list[dict[str, Any]]:
    """Regions of the same size that cover an image. Those later in the list have more tokens."""
    places = itertools.product(range(rows), range(columns))
    return [
        region((x / columns, y / rows, (x + 1) / columns, (y + 1) / rows), tokens=1 + y * columns + x, of=999)
        for y, x in places
    ]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Word]:
    """The words of the drawing."""
    words: list[Word] = []
    write = PIL.ImageDraw.ImageDraw.text

    def record(self: PIL.ImageDraw.ImageDraw, xy: Any, text: str, *rest: Any, **options: Any) -> None:
        font = options["font"]
        words.append(Word(text, self.textbbox(xy, text, font=font), font.size))
        write(self, xy, text, *rest, **options)

    monkeypatch.setattr(PIL.ImageDraw.ImageDraw, "text", record)
    return words


def blank_image(size: tuple[int, int] = SIZE) -> PIL.Image.Image:
    return PIL.Image.new("RGB", size, (200, 200, 200))


def enlarged(size: tuple[int, int]) -> tuple[int, int]:
    scale = max(1, LEAST_SIDE / max(size))
    return round(size[0] * scale), round(size[1] * scale)


def split(words: list[Word], size: tuple[int, int]) -> tuple[list[Word], list[Word]]:
    """The words in the image, and those beside or below it."""
    inside = [word for word in words if word.box[0] < size[0] and word.box[1] < size[1]]
    return inside, [word for word in words if word not in inside]


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def rows_of(legend: list[Word]) -> list[list[str]]:
    """The rows of the tables, each beginning with its number."""
    texts = [word.text for word in legend]
    starts = [at for at, text in enumerate(texts) if text.isdecimal()]
    return [texts[at : at + 5] for at in starts]


def test_the_legend_says_why_how_many_tokens_and_at_which_resolution(written: list[Word]) -> None:
    first = region(HALVES[0], 0.2, 5, 99, 0.253, "much content")
    second = region(HALVES[1], 0.484, 90, 192, 1, "asked about")
    drawing = show(blank_image(), explain(first, second))
    inside, legend = split(written, SIZE)
    assert [(word.text, word.box[0] > 320) for word in inside] == [("1", True), ("2", False)]
    assert rows_of(legend) == [
        ["1", "asked about", "90 of 192", "100% of native", "0.48"],
        ["2", "much content", "5 of 99", "25% of native", "0.20"],
    ]
    assert [word.text for word in legend if word.text not in sum(rows_of(legend), [])] == [
        "100 of 300 visual tokens",
        "20 of them for the small view of the whole",
        "The model looked once at a small view with your question",
        "compress 0.15, exploit 0.80, focus 0.84",
        *("why", "tokens", "resolution", "relevance"),
    ]
    assert drawing.height == 480, "the legend is beside the image"
    assert drawing.width > 640


@pytest.mark.parametrize("why", ["asked about", "stands out", "much content"])
def test_every_reason_is_in_words(written: list[Word], why: str) -> None:
    show(blank_image(), explain(region(ALL, why=why)))
    assert [row[1] for row in rows_of(split(written, SIZE)[1])] == [why]


@pytest.mark.parametrize(
    ("looks", "words"),
    [
        (0, "The model did not look for what your question is about"),
        (1, "The model looked once at a small view with your question"),
    ],
)
def test_the_looks_are_in_words(written: list[Word], looks: int, words: str) -> None:
    show(blank_image(), explain(region(ALL), looks=looks))
    assert words in [word.text for word in written]


@pytest.mark.parametrize(
    ("count", "whole", "words"),
    [
        (0, 20, None),
        (1, 20, "1 region (thin grey frame) is only in the small view"),
        (3, 20, "3 regions (thin grey frames) are only in the small view"),
        (2, 0, "2 regions (thin grey frames) are left out"),
    ],
)
def test_regions_without_tokens_have_one_line_and_no_number(
    written: list[Word], count: int, whole: int, words: str | None
) -> None:
    without = [region((0.5, at / 3, 1, (at + 1) / 3), 0.1, 0, 99, 0, "") for at in range(count)]
    show(blank_image(), explain(region(HALVES[0]), *without, whole=whole))
    inside, legend = split(written, SIZE)
    assert [word.text for word in inside] == ["1"]
    assert len(rows_of(legend)) == 1
    assert legend[-1].text == (words or "0.50")


def test_without_tokens_of_its_own_no_region_has_a_row(written: list[Word]) -> None:
    show(blank_image(), explain(region(ALL, 0.1, 0, 99, 0, "")))
    inside, legend = split(written, SIZE)
    assert inside == []
    assert [word.text for word in legend][-1] == "1 region (thin grey frame) is only in the small view"
    assert "why" not in [word.text for word in legend]


@pytest.mark.parametrize("size", [(64, 64), (640, 480), (1344, 896), (2400, 220), (360, 1800), (3000, 2000)])
@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (3, 2), (10, 6)])
def test_words_hide_no_other_region_and_no_other_words(
    written: list[Word], size: tuple[int, int], columns: int, rows: int
) -> None:
    regions = raster(columns, rows)
    drawing = show(blank_image(size), explain(*regions))
    size = enlarged(size)
    inside, legend = split(written, size)
    numbered = sorted(regions, key=lambda each: -each["tokens"])
    for word, each in zip(inside, numbered, strict=True):
        left, top, right, bottom = (share * side for share, side in zip(each["box"], size * 2, strict=True))
        assert left <= word.box[0] < word.box[2] <= right, "the number is in its region"
        assert top <= word.box[1] < word.box[3] <= bottom
    assert [word.text for word in inside] == [str(number) for number in range(1, len(regions) + 1)]
    assert [(row[0], row[2]) for row in rows_of(legend)] == [
        (str(number), f"{each['tokens']} of 999") for number, each in enumerate(numbered, 1)
    ]
    assert min(word.points for word in legend) >= LEAST_FONT
    image = (0, 0, *size)
    for word in legend:
        assert not overlap(word.box, image)
        assert word.box[2] <= drawing.width
        assert word.box[3] <= drawing.height
    for one, other in itertools.combinations(legend, 2):
        assert not overlap(one.box, other.box), (one, other)


@pytest.mark.parametrize(("size", "below"), [((640, 480), False), ((1280, 640), False), ((1300, 640), True)])
def test_the_legend_of_a_very_wide_image_is_below(size: tuple[int, int], below: bool) -> None:
    drawing = show(blank_image(size), explain(region(ALL)))
    assert (drawing.width > size[0], drawing.height > size[1]) == (not below, below)


def test_numbers_shrink_until_they_fit_into_narrow_regions(written: list[Word]) -> None:
    show(blank_image((1344, 896)), explain(*raster(60, 1)))
    inside, _ = split(written, (1344, 896))
    assert [word.text for word in inside] == [str(number) for number in range(1, 61)]
    assert inside[-1].points < inside[0].points == LEAST_FONT
    for place, word in enumerate(reversed(inside)):
        assert 1344 / 60 * place <= word.box[0] < word.box[2] <= 1344 / 60 * (place + 1)


def test_a_region_without_room_for_a_number_has_one() -> None:
    tiny = region((0.99, 0.99, 1.0, 1.0))
    drawing = show(blank_image((640, 200)), explain(tiny, region((0, 0, 0, 0)), region((1, 1, 1, 1))))
    assert drawing.width == 640


@pytest.mark.parametrize(
    ("tokens", "lod", "colour"), [(9, 1, NATIVE), (9, 0.6, LOWER), (0, 0, WHOLE_ONLY)], ids=str
)
def test_the_colour_of_the_frame(tokens: int, lod: float, colour: tuple[int, int, int]) -> None:
    drawing = show(blank_image(), explain(region(ALL, tokens=tokens, lod=lod)))
    edge = 1 if tokens else 0
    assert drawing.getpixel((320, edge)) == drawing.getpixel((edge, 240)) == colour


def test_the_frame_of_a_region_without_tokens_is_one_pixel_wide() -> None:
    drawing = show(blank_image(), explain(region(ALL, tokens=0, lod=0)))
    assert drawing.getpixel((320, 0)) == WHOLE_ONLY
    assert drawing.getpixel((320, 1)) != WHOLE_ONLY


@pytest.mark.parametrize(
    ("peak", "corner"),
    [((7, 10), (0, 0)), ((0, 0), (1, 0)), ((14, 19), (0, 0))],
    ids=["top left by default", "top right if the peak is there", "not at the peak"],
)
def test_the_number_does_not_hide_the_most_relevant_place(
    written: list[Word], peak: tuple[int, int], corner: tuple[int, int]
) -> None:
    """The words in the first corner once covered the text that the question was about."""
    show(blank_image(), explain(region(ALL), peak=peak))
    [word] = split(written, SIZE)[0]
    assert (word.box[0] > 320, word.box[1] > 240) == tuple(map(bool, corner))


def test_among_corners_of_the_same_relevance_the_plainest_is_taken(written: list[Word]) -> None:
    picture = blank_image()
    PIL.ImageDraw.Draw(picture).rectangle((8, 8, 630, 12), fill="black")
    show(picture, explain(region(ALL), peak=(7, 10)))
    [word] = split(written, SIZE)[0]
    assert (word.box[0] > 320, word.box[1] > 240) == (False, True)


@pytest.mark.parametrize(("relevance", "kept"), [(0.0, 1 - DIM), (0.5, 0.73), (1.0, 1 - WARMTH)])
def test_the_tint_keeps_most_of_the_contrast(relevance: float, kept: float) -> None:
    """The contrast of black on white is more than half of its own at every relevance."""
    pair = PIL.Image.fromarray(np.array([[[0] * 3, [255] * 3]], np.uint8))
    black, white = _tint(pair, np.full((1, 2), relevance, np.float32))[0].astype(float)
    assert (white - black) / 255 == pytest.approx(kept, abs=0.01)
    assert kept > 0.5


def test_warm_places_are_brighter_than_cold_ones() -> None:
    """There was once a bright ring around each warm place, where the tint of neither side was used."""
    steps = np.linspace(0, 1, 11, dtype=np.float32)[None]
    pixels = _tint(blank_image((11, 1)), steps)[0].astype(float)
    assert (np.diff(pixels.sum(axis=1)) > 0).all()
    assert pixels[0] == pytest.approx((1 - DIM) * 200 + DIM * COLD, abs=1)
    assert pixels[-1] == pytest.approx((1 - WARMTH) * 200 + WARMTH * WARM, abs=1)


def test_a_small_image_is_enlarged() -> None:
    drawing = show(blank_image((64, 48)), explain(region(ALL), peak=(7, 10)))
    assert drawing.height == 480
    assert drawing.getpixel((600, 470)) == drawing.getpixel((600, 100)), "the whole width is drawn"
