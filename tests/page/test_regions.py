"""The viewer of an image: its regions in words, for the pointer, the keyboard and screen readers."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route

from tests.page.conftest import EXAMPLES
from tests.page.support import ask, events, paste_file, text_chunk

HINT = "Point at a region"
ROWS, COLUMNS = 20, 28


def region(
    box: tuple[float, ...], tokens: int, why: str, lod: float = 1, relevance: float = 0.5
) -> dict[str, Any]:
    found = {"tokens": tokens, "of": 192, "lod": lod, "relevance": relevance, "why": why}
    return {"box": list(box), **found}


QUARTERS = [
    region((0, 0, 0.5, 0.5), 9, "much content", relevance=0.45),
    region((0.5, 0, 1, 0.5), 68, "asked about", relevance=0.53),
    region((0, 0.5, 0.5, 1), 17, "stands out", 0.5, 0.39),
    region((0.5, 0.5, 1, 1), 0, "", 0, 0.1),
]
ORDER = (1, 2, 0)
"""Indices of the quarters by their tokens."""
WORDS = [
    "Region 1, asked about: 68 of 192 tokens, 100 % of native resolution, relevance 0.53",
    "Region 2, stands out: 17 of 192 tokens, 50 % of native resolution, relevance 0.39",
    "Region 3, much content: 9 of 192 tokens, 100 % of native resolution, relevance 0.45",
]


def explanation(regions: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    """The division of an image whose most relevant cells are at the top left."""
    cells = [[1 - (row + column) / (ROWS + COLUMNS) for column in range(COLUMNS)] for row in range(ROWS)]
    fixed = {"tokens": 124, "of": 560, "thumbnail_tokens": 30, "allocation_ms": 1.5}
    return {**fixed, "grid": [ROWS, COLUMNS], "map": cells, "regions": regions, "looks": 1, **others}


def view(page: Page, relevance: dict[str, Any]) -> None:
    """Let the server seem to divide an image so, and open the image in the viewer."""
    use = {
        "visual_tokens": relevance["tokens"],
        "of": relevance["of"],
        "method": "relevance",
        "relevance": relevance,
    }

    def respond(route: Route) -> None:
        last = text_chunk("", "stop") | {"fovea": {"timings_ms": {"encode": 12}, "images": [use]}}
        route.fulfill(
            status=200, content_type="text/event-stream", body=events(text_chunk("It is a star."), last)
        )

    page.route("**/v1/chat/completions", respond)
    paste_file(page, EXAMPLES / "page.png")
    ask(page, "What is it?")
    page.locator(".answer .thumb").click()
    page.locator("#viewer[open]").wait_for()


def table(page: Page) -> list[list[str]]:
    rows: list[list[str]] = page.locator(".viewer-side tbody tr").evaluate_all(
        "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    return rows


def test_the_list_says_why_each_region_got_tokens(page: Page) -> None:
    view(page, explanation(QUARTERS))
    assert table(page) == [
        ["1", "asked about", "68 of 192", "100 %", "0.53"],
        ["2", "stands out", "17 of 192", "50 %", "0.39"],
        ["3", "much content", "9 of 192", "100 %", "0.45"],
    ]
    side = page.locator(".viewer-side").inner_text()
    assert "The model looked once at a small view with your question." in side
    assert "1 more region is only in the small view of the whole." in side
    numbers = page.locator(".stage .tag")
    assert numbers.all_inner_texts() == ["1", "2", "3"]
    indices = page.locator(".stage .region").evaluate_all("(all) => all.map((each) => each.dataset.region)")
    assert indices == [str(index) for index in ORDER]


def test_a_region_is_described_when_pointed_at_or_focused(page: Page) -> None:
    view(page, explanation(QUARTERS))
    page.mouse.move(1, 1)  # the pointer may be where a region appeared
    line = page.locator(".region-words")
    assert line.inner_text().startswith(HINT)
    for place, words in enumerate(WORDS):
        frame = page.locator(".stage .region").nth(place)
        assert frame.get_attribute("aria-label") == words
        frame.hover()
        assert line.inner_text() == words
        assert page.locator("tr.marked").count() == 1
        assert page.locator("tr[data-row]").nth(place).evaluate("(row) => row.classList.contains('marked')")
    page.mouse.move(1, 1)
    assert line.inner_text().startswith(HINT)
    page.locator(".scroller").focus()
    for words in WORDS:
        page.keyboard.press("Tab")
        assert line.inner_text() == words
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == words
        assert page.locator(".region.marked").count() == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "TR"
    assert line.inner_text() == WORDS[0], "the rows of the list say the same"


def test_a_number_is_in_the_least_relevant_corner_of_its_region(page: Page) -> None:
    """The map falls from the top left to the bottom right."""
    view(page, explanation(QUARTERS))
    for place in range(3):
        frame = page.locator(".stage .region").nth(place).bounding_box()
        number = page.locator(".stage .tag").nth(place).bounding_box()
        assert frame is not None
        assert number is not None
        assert number["x"] + number["width"] == pytest.approx(frame["x"] + frame["width"], abs=3)
        assert number["y"] + number["height"] == pytest.approx(frame["y"] + frame["height"], abs=3)


@pytest.mark.parametrize(("looks", "words"), [(0, "did not look"), (1, "looked once")])
def test_the_looks_are_in_words(page: Page, looks: int, words: str) -> None:
    view(page, explanation(QUARTERS, looks=looks))
    assert words in page.locator(".viewer-side").inner_text()


def test_sixty_regions_are_listed_and_no_number_leaves_its_region(page: Page) -> None:
    raster = [
        region((x / 10, y / 6, (x + 1) / 10, (y + 1) / 6), 60 - 10 * y - x, "stands out")
        for y in range(6)
        for x in range(10)
    ]
    view(page, explanation(raster))
    assert [row[0] for row in table(page)] == [str(number) for number in range(1, 61)]
    outside = page.locator(".stage .region").evaluate_all(
        """(all) => all.filter((each) => {
            const [region, number] = [each, each.firstChild].map((part) => part.getBoundingClientRect());
            return number.left < region.left || number.right > region.right || number.top < region.top
                || number.bottom > region.bottom;
        }).length"""
    )
    assert outside == 0


def test_answers_stored_before_regions_had_reasons_are_shown(page: Page) -> None:
    old = [{name: value for name, value in each.items() if name != "why"} for each in QUARTERS]
    division = explanation(old)
    del division["looks"]
    view(page, division)
    assert [row[:3] for row in table(page)][0] == ["1", "", "68 of 192"]
    page.locator(".stage .region").first.hover()
    assert page.locator(".region-words").inner_text() == WORDS[0].replace(", asked about", "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_in_the_regions(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    view(page, explanation(QUARTERS))
    found = [
        fault
        for fault in Axe().run(page).response["violations"]
        if fault["impact"] in ("serious", "critical")
    ]
    assert found == []
