"""Pages: words that overlap or leave the page are faults, and folders keep all that is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from fovea.evaluation.documents.content import Content, Field, Series, Table
from fovea.evaluation.documents.page import Page, Word, faults, lines_of, places_of
from fovea.evaluation.documents.store import read, records, write


def word(left: float, top: float, at: str = "") -> Word:
    """A word of two characters, 20 pixels wide and high."""
    return Word("ab", (left, top, left + 20, top + 20), (left, left + 10), at)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ((word(0, 0), word(30, 0), word(0, 30)), 0),
        ((word(0, 0), word(10, 0)), 1),
        ((word(0, 0), word(0, 14)), 0),  # close lines: the boxes overlap, the letters do not
        ((word(0, 0), word(0, 6)), 1),
        ((word(-5, 0),), 1),
        ((word(90, 0),), 1),
        ((word(0, 90),), 1),
    ],
    ids=["apart", "beside", "close-lines", "above", "left", "right", "below"],
)
def test_faults(words: tuple[Word, ...], count: int) -> None:
    assert faults(words, 100, 100) == count


def test_places_and_lines_of_a_fact() -> None:
    words = (word(0, 0, "title"), word(30, 0, "title"), word(0, 30, "title"), word(60, 60))
    assert places_of(words) == {"title": (0, 0, 50, 50)}
    assert [len(line) for line in lines_of(words, "title")] == [2, 1]


def test_a_folder_keeps_pages(tmp_path: Path) -> None:
    content = Content(
        "invoice", "Bill", (Field("total", "Total", "1.00", "amount"),),
        (Table(("Item", "Sum"), (("Desk", "1.00"),), "item"),), ("Thanks.",),
        (Series("Cost", (("A", "1"),)),),
    )  # fmt: skip
    words = (word(0.5, 3, "title"),)
    page = Page("a/1", "a", "Go", Image.new("RGB", (32, 64), "red"), content, words, places_of(words))
    write(page, tmp_path, "0")
    write(page, tmp_path, "1")
    first, second = (read(tmp_path, line) for line in records(tmp_path))
    assert (first.content, first.words, first.places) == (content, words, page.places)
    assert first.image.tobytes() == second.image.tobytes() == page.image.tobytes()
