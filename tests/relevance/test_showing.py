"""The drawing of a division: every region's relevance, tokens and resolution, inside the region or below."""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import pytest

from fovea.relevance.showing import COLD, LINE, LOWER, MARGIN, NATIVE, WHOLE_ONLY, show

SIZE = 640, 480
Box = tuple[float, float, float, float]


def region(box: Box, relevance: float, tokens: int, of: int, lod: float) -> dict[str, Any]:
    return {"box": list(box), "relevance": relevance, "tokens": tokens, "of": of, "lod": lod}


def explain(*regions: dict[str, Any], peak: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    cells = np.zeros((15, 20))
    cells[peak] = 1.0
    return {
        "regions": list(regions),
        "map": cells.tolist(),
        "tokens": 100,
        "of": 300,
        "thumbnail_tokens": 20,
        "tensions": {"compress_particularize": 0.15, "exploit_explore": 0.8, "focus_diversify": 0.84},
    }


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[float, ...]]]:
    """The words in the picture, each with its box in pixels."""
    words: list[tuple[str, tuple[float, ...]]] = []
    write = PIL.ImageDraw.ImageDraw.multiline_text

    def record(self: PIL.ImageDraw.ImageDraw, xy: Any, text: str, *rest: Any, **options: Any) -> None:
        edges = self.multiline_textbbox(xy, text, font=options["font"], stroke_width=options["stroke_width"])
        words.append((text, edges))
        write(self, xy, text, *rest, **options)

    monkeypatch.setattr(PIL.ImageDraw.ImageDraw, "multiline_text", record)
    return words


def blank_image(size: tuple[int, int] = SIZE) -> PIL.Image.Image:
    return PIL.Image.new("RGB", size, (200, 200, 200))


def test_every_region_says_its_relevance_tokens_and_resolution(
    written: list[tuple[str, tuple[float, ...]]],
) -> None:
    halves = (0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0)
    drawing = show(
        blank_image(), explain(region(halves[0], 0.484, 90, 192, 1), region(halves[1], 0.2, 5, 99, 0.253))
    )
    assert drawing.size == (640, 480 + 2 * LINE + MARGIN), "the words need no lines below the image"
    assert [words.split("\n") for words, _ in written] == [
        ["relevance 0.48", "90 of 192 tokens", "100% of native resolution"],
        ["relevance 0.20", "5 of 99 tokens", "25% of native resolution"],
    ]
    for (_, (left, top, right, bottom)), box in zip(written, halves, strict=True):
        assert box[0] * 640 <= left < right <= box[2] * 640
        assert box[1] * 480 <= top < bottom <= box[3] * 480


def test_a_low_region_has_its_words_in_one_line(written: list[tuple[str, tuple[float, ...]]]) -> None:
    show(blank_image(), explain(region((0, 0, 1, 0.07), 0.5, 20, 20, 1)))
    assert [words for words, _ in written] == ["relevance 0.50, 20 of 20 tokens, 100% of native resolution"]


def test_the_words_of_a_small_region_are_below_the_image(
    written: list[tuple[str, tuple[float, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    write = PIL.ImageDraw.ImageDraw.text

    def record(self: PIL.ImageDraw.ImageDraw, xy: Any, text: str, *rest: Any, **options: Any) -> None:
        lines.append(text)
        write(self, xy, text, *rest, **options)

    monkeypatch.setattr(PIL.ImageDraw.ImageDraw, "text", record)
    small = (0.0, 0.0, 0.1, 0.1), (0.9, 0.9, 1.0, 1.0)
    drawing = show(
        blank_image(),
        explain(region(small[0], 0.5, 4, 4, 1), region((0.2, 0.2, 0.8, 0.8), 0.1, 0, 99, 0),
                region(small[1], 0.4, 2, 4, 0.7)),
    )  # fmt: skip
    assert [words for words, _ in written][::2] == ["1", "2"]
    assert lines[-2:] == [
        "1:  relevance 0.50, 4 of 4 tokens, 100% of native resolution",
        "2:  relevance 0.40, 2 of 4 tokens, 70% of native resolution",
    ]
    assert drawing.height == 480 + 4 * LINE + MARGIN


@pytest.mark.parametrize(
    ("tokens", "lod", "colour"), [(9, 1, NATIVE), (9, 0.6, LOWER), (0, 0, WHOLE_ONLY)], ids=str
)
def test_the_colour_of_the_frame(tokens: int, lod: float, colour: tuple[int, int, int]) -> None:
    drawing = show(blank_image(), explain(region((0, 0, 1, 1), 0.5, tokens, 9, lod)))
    assert drawing.getpixel((320, 1)) == drawing.getpixel((1, 240)) == colour


@pytest.mark.parametrize(
    ("peak", "corner"),
    [((7, 10), (0, 0)), ((0, 0), (1, 0)), ((14, 19), (0, 0))],
    ids=["top left by default", "top right if the peak is there", "not at the peak"],
)
def test_the_words_do_not_hide_the_most_relevant_place(
    written: list[tuple[str, tuple[float, ...]]], peak: tuple[int, int], corner: tuple[int, int]
) -> None:
    """The words in the first corner once covered the text that the question was about."""
    show(blank_image(), explain(region((0, 0, 1, 1), 0.5, 9, 9, 1), peak=peak))
    [(_, (left, top, right, bottom))] = written
    assert (left > 320, top > 240) == tuple(map(bool, corner))


def test_a_small_image_is_enlarged_and_cold_cells_are_dark() -> None:
    drawing = show(blank_image((64, 48)), explain(region((0, 0, 1, 1), 0.5, 9, 9, 1), peak=(7, 10)))
    assert drawing.size == (640, 480 + 2 * LINE + MARGIN)
    dark = np.asarray(drawing)[470, 100].astype(float)
    assert dark == pytest.approx(0.45 * np.array((200, 200, 200)) + 0.55 * COLD, abs=2)
