"""Cases about the pages that come with fovea-page: spread, exact, never the same question twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image
from tests.evaluation.documents.shipped import fill

from fovea.core.errors import CheckpointError, InvalidRequest
from fovea.evaluation.documents import held_out
from fovea.evaluation.documents.held_out import LARGE, document_cases, large_pages, renderer_of
from fovea.evaluation.documents.questions import KINDS
from fovea.evaluation.score import Result, report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("pages"))


def test_every_kind_has_its_share_and_a_right_answer(folder: Path) -> None:
    cases = list(document_cases(3, folder=folder))
    assert Counter(case.kind for case in cases) == dict.fromkeys(KINDS, 3)
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        assert case.exchanges[0].accepted[0]
        assert case.facts["characters"] == len(case.exchanges[0].accepted[0])
        with Image.open(case.images[0]) as image:
            assert image.size == (case.facts["width"], case.facts["image_height"])


def test_no_page_gets_a_question_twice_and_all_pages_get_one_before_any_gets_two(folder: Path) -> None:
    cases = list(document_cases(15, ("field",), folder=folder))
    per_page = Counter(case.images[0] for case in cases)
    assert sorted(per_page.values()) == [2, 2, 2, 3, 3, 3]
    assert len({(case.images[0], case.exchanges[0].accepted) for case in cases}) == 15


def test_questions_about_one_page_come_together(folder: Path) -> None:
    """So the encoder's output of a page is computed once for all of its questions."""
    pictures = [case.images[0] for case in document_cases(6, ("field", "title", "bar"), folder=folder)]
    assert pictures == sorted(pictures)


def test_more_questions_than_the_pages_have(folder: Path) -> None:
    """Six invoices have three fields each. In other words the same field is the same question."""
    assert len(list(document_cases(18, ("field",), folder=folder))) == 18
    with pytest.raises(InvalidRequest, match="have 18 questions of the kind 'field'; 19 were asked for"):
        document_cases(19, ("field",), folder=folder)


def test_the_seed_chooses_the_questions(folder: Path) -> None:
    first, again, other = (list(document_cases(4, folder=folder, seed=seed)) for seed in (7, 7, 8))
    assert first == again
    assert [case.exchanges for case in first] != [case.exchanges for case in other]


def test_json_brings_its_schema(folder: Path) -> None:
    for case in document_cases(4, ("json",), folder=folder):
        exchange = case.exchanges[0]
        assert exchange.schema is not None
        assert exchange.schema["required"] == list(json.loads(exchange.accepted[0]))


def test_the_focus_holds_the_answer(folder: Path) -> None:
    """A field of page 0 at 160, 50 + 24 n is as large as its characters."""
    [case] = [
        case
        for case in document_cases(18, ("field",), folder=folder)
        if case.exchanges[0].accepted[0] == "INV-07"
    ]
    assert case.exchanges[0].focus[0] == (160, 50, 160 + 6 * 8, 66)
    assert case.facts["height"] == 16


def test_parts_are_rows_of_the_report(folder: Path) -> None:
    cases = list(document_cases(6, ("title", "field", "bar"), folder=folder))
    results = [Result(case, case.exchanges[0].accepted[:1], 9, 4, 2) for case in cases]
    rows = {row.kind: row.cases for row in report(results)}
    names = [
        "title", "field", "bar", "look: clean", "look: scanned", "page: chart", "page: invoice",
        "renderer: Chromium", "renderer: matplotlib", "text: at least 16 px", "text: below 16 px", "all",
    ]  # fmt: skip
    assert sorted(rows) == sorted(names)
    assert list(rows)[-9:] == names[-9:]
    assert rows["look: scanned"] == rows["page: chart"] == rows["renderer: matplotlib"] >= 6
    assert rows["look: clean"] + rows["look: scanned"] == rows["all"] == 18
    assert rows["text: below 16 px"] + rows["text: at least 16 px"] == 18


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("invoice_ribbon", "Chromium"),
        ("chart_donut", "matplotlib"),
        ("form_typst", "Typst"),
        ("sheet", "several"),
    ],
)
def test_renderers(template: str, name: str) -> None:
    assert renderer_of(template) == name


def test_timed_pages_are_large_and_the_largest_come_first(folder: Path) -> None:
    cases = large_pages(3, folder=folder)
    assert [case.images[0].size for case in cases] == [LARGE] * 3
    assert [case.kind for case in cases] == ["field"] * 3
    assert len({case.images[0].getpixel((0, 0)) for case in cases}) == 3
    assert cases[0].images[0].getpixel((0, 0)) == cases[0].images[0].getpixel((1300, 1300))


def test_an_unknown_kind(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="unknown kind 'colour'; there are field, cell, row, "):
        document_cases(1, ("colour",), folder=folder)


def test_a_package_without_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "page_package", lambda: tmp_path)
    with pytest.raises(CheckpointError, match="holds no pages; reinstall with: pip install"):
        document_cases(1)
