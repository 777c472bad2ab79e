"""The tool that draws the pages of fovea-page: sizes of text, scans, and the share of each sort of page."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from tests.evaluation.documents.shipped import invoice
from tools.held_out_pages import PATTERN, outside, sized, worn_out

from fovea.evaluation.documents.page import Page


def heights(page: Page) -> list[float]:
    return [round(word.box[3] - word.box[1], 3) for word in page.words]


def test_sorts_of_pages() -> None:
    """Sheets are the large pages, and every renderer draws enough pages for a row of its own."""
    counts = Counter(PATTERN[number % len(PATTERN)] for number in range(330))
    assert counts["sheet"] >= 60
    assert min(counts.values()) >= 30
    assert sum(counts.values()) == 330


def test_boxes_become_as_high_as_the_text_and_stay_in_place() -> None:
    page = invoice(1)
    after = sized(page, 1.25)
    assert heights(after) == [round(height / 1.25, 3) for height in heights(page)]
    assert [word.middle for word in after.words] == pytest.approx([word.middle for word in page.words])
    assert after.places == page.places


@pytest.mark.parametrize("seed", range(4))
def test_a_scan_keeps_all_words_on_the_page_and_their_heights(seed: int) -> None:
    """The box around a tilted word is higher than the word, and would make its text seem larger."""
    page = invoice(2)
    after = worn_out(Random(seed), page)
    assert outside(after) == 0
    assert heights(after) == heights(page)
    assert after.name.endswith("/scanned")
    assert after.places != page.places
