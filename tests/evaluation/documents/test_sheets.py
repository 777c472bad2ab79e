"""Sheets: documents side by side whose facts cannot be mixed up."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.evaluation.documents.shipped import chart, invoice

from fovea.evaluation.documents.content import Content, Field
from fovea.evaluation.documents.page import Page
from fovea.evaluation.documents.sheet import sheet, tell_apart


def made(*pages: Page, size: tuple[int, int] = (700, 320)) -> tuple[Page, list[Page]]:
    done = sheet(Random(1), pages, size)
    assert done is not None
    return done


def test_all_facts_are_on_the_sheet_at_their_new_places() -> None:
    one, other = invoice(1), chart(2)
    page, used = made(one, other)
    assert used == [one, other]
    assert page.image.size == (700, 320)
    assert page.content.fields == one.content.fields
    assert page.content.series == other.content.series
    left, top = 16, 16
    box = one.places["field:total"]
    assert page.places["field:total"] == (box[0] + left, box[1] + top, box[2] + left, box[3] + top)
    assert page.image.getpixel((left, top)) == one.image.getpixel((0, 0))
    assert len(page.words) == len(one.words) + len(other.words)


def test_tables_and_paragraphs_are_counted_on_and_titles_are_left_out() -> None:
    one, other = invoice(1), invoice(2)
    renamed = Content("table", "Other", (), other.content.tables, other.content.paragraphs)
    table = replace(renamed.tables[0], columns=("Name", "Count"))
    page, used = made(one, replace(other, content=replace(renamed, tables=(table,))))
    assert len(used) == 2
    assert [table.columns[1] for table in page.content.tables] == ["Qty", "Count"]
    assert page.places["cell:1:2:1"][0] > page.places["cell:0:2:1"][0]
    assert page.places["paragraph:1"][0] > page.places["paragraph:0"][0]
    assert "title" not in page.places
    assert {word.at for word in page.words} >= {"", "cell:1:0:0"}


def test_documents_that_can_be_mixed_up_are_not_on_one_sheet() -> None:
    assert sheet(Random(1), (invoice(1), invoice(2)), (1000, 1000)) is None
    assert not tell_apart(chart(1).content, chart(2).content)
    one = Content("letter", "A", (Field("sender", "From", "x"),))
    assert not tell_apart(one, Content("letter", "B", (Field("seller", "Supplier", "y"),)))  # alike
    assert not tell_apart(one, Content("letter", "B", (Field("origin", "from", "y"),)))  # the same label
    assert tell_apart(one, Content("letter", "B", (Field("total", "Total", "y"),)))


def test_documents_without_room_are_left_out() -> None:
    assert sheet(Random(1), (invoice(1), chart(1)), (400, 300)) is None
    assert len(made(invoice(1), chart(1), size=(360, 600))[1]) == 2
