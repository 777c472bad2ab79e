"""Questions about a page that is made by hand: each answer is the one that stands on the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import jsonschema
import pytest
from PIL import Image

from fovea.evaluation.documents import fields, questions, structured
from fovea.evaluation.documents.content import Content, Field, Series, Table
from fovea.evaluation.documents.page import Page, Word, places_of
from fovea.evaluation.scenes.sample import Turn
from fovea.evaluation.score import matches

FIELDS = (
    Field("total", "Amount due", "€ 12.50", "amount"),
    Field("invoice_date", "Issued", "3 May 2024", "date"),
    Field("phone", "Tel.", "0999 1234567", "code"),
)
TABLE = Table(("Item", "Qty", "Price"), (("Lamp", "2", "5.00"), ("Chair", "1", "5.00")), "item")
CONTENT = Content(
    "invoice", "Bill", FIELDS, (TABLE,), ("One two three four five six.",), (Series("Sales", (("Q1", "7"),)),)
)


def words(text: str, at: str, y: float) -> list[Word]:
    """The words of a line at a height, with characters 8 pixels wide."""
    made, x = [], 10.0
    for part in text.split():
        starts = tuple(x + 8 * index for index in range(len(part)))
        made.append(Word(part, (x, y, x + 8 * len(part), y + 18), starts, at))
        x += 8 * (len(part) + 1)
    return made


def page(*hidden: str) -> Page:
    """The page of CONTENT. hidden: facts that are cut off."""
    lines = {"title": "Bill", "paragraph:0": CONTENT.paragraphs[0], "bar:0:0": "Q1"}
    lines |= {f"field:{one.key}": one.value for one in FIELDS}
    lines |= {f"cell:0:{r}:{c}": text for r, row in enumerate(TABLE.rows) for c, text in enumerate(row)}
    shown = [
        word
        for n, (at, text) in enumerate(lines.items())
        if at not in hidden
        for word in words(text, at, 20 * n)
    ]
    return Page(
        "p",
        "invoice_test",
        "Test",
        Image.new("RGB", (640, 640)),
        CONTENT,
        tuple(shown),
        places_of(tuple(shown)),
    )


def asked(kind: str, shown: Page, count: int = 200) -> Iterator[Turn]:
    turns = (questions.KINDS[kind](Random(index), shown) for index in range(count))
    return (turn for turn in turns if turn is not None)


def test_fields_by_meaning_and_by_label() -> None:
    found = {turn.question: turn for turn in asked("field", page())}
    assert found["What is the total?"].answer == "€ 12.50"
    assert found['What is written at "Issued"?'].answer == "3 May 2024"
    assert found["Read the phone."].focus == (page().places["field:phone"],)


def test_an_amount_is_right_without_its_currency() -> None:
    [turn] = [turn for turn in asked("field", page()) if turn.question == "What is the total?"][:1]
    assert matches("12.50", turn.accepted)
    assert not matches("12.5", turn.accepted)


def test_what_is_cut_off_is_not_asked_for() -> None:
    found = list(asked("field", page("field:total")))
    assert found
    assert all(turn.answer != "€ 12.50" for turn in found)


def test_cells_name_their_row_and_column() -> None:
    found = {turn.question: turn.answer for turn in asked("cell", page())}
    assert found['In the row "Lamp", what is the Qty?'] == "2"
    assert found['What is the Price of "Chair"?'] == "5.00"


def test_a_row_is_asked_for_only_by_a_value_of_its_own() -> None:
    """Both rows cost 5.00, so the price names none of them."""
    found = {turn.question: turn.answer for turn in asked("row", page())}
    assert set(found.values()) == {"Lamp", "Chair"}
    assert not any("Price" in question for question in found)


def test_lines_and_the_words_in_them() -> None:
    found = {turn.question: turn.answer for turn in asked("line", page())}
    assert found['Read the line that begins with "One two".'] == "One two three four five six."
    assert found['Which word comes after "two three"?'] == "four"


def test_absent_fields_cannot_be_taken_for_present_ones() -> None:
    """A due date may be read as the invoice date, and a subtotal as the total."""
    found = {turn.question for turn in asked("absent", page(), 600)}
    assert found
    for name in ("total", "subtotal", "due date", "date", "invoice date", "phone", "email"):
        assert f"What is the {name}?" not in found
    assert "What is the seat?" in found
    assert {turn.answer for turn in asked("absent", page())} == {fields.ABSENT}


def test_presence_is_yes_for_words_of_the_page_and_no_for_others() -> None:
    text = {word.text.strip(".").lower() for word in page().words}
    answers = set()
    for turn in asked("presence", page()):
        word = turn.question.split('"')[1].lower()
        assert (word in text) == (turn.answer == "Yes")
        answers.add(turn.answer)
    assert answers == {"Yes", "No"}


def test_json_follows_its_schema_and_names_what_is_missing() -> None:
    nulls = 0
    for turn in asked("json", page()):
        assert turn.schema is not None
        value = json.loads(turn.answer)
        if "item" in value:
            continue
        jsonschema.validate(value, dict(turn.schema))
        for key, text in value.items():
            known = {structured.camel(one.key): one.value for one in FIELDS} | {
                one.key: one.value for one in FIELDS
            }
            assert text == known.get(key)
            nulls += text is None
        assert matches(json.dumps(value, indent=2), turn.accepted)
    assert nulls


def test_a_row_as_json_has_the_columns_as_keys() -> None:
    rows = [turn for turn in asked("json", page()) if '"item"' in turn.answer]
    lamp = next(turn for turn in rows if "Lamp" in turn.question)
    assert json.loads(lamp.answer) == {"item": "Lamp", "qty": "2", "price": "5.00"}
    assert lamp.schema is not None
    assert list(lamp.schema["properties"]) == ["item", "qty", "price"]
    cut = [turn for turn in asked("json", page("cell:0:0:1")) if '"item"' in turn.answer]
    assert {json.loads(turn.answer)["item"] for turn in cut} == {"Chair"}


def test_bars_by_name_and_by_value() -> None:
    found = {turn.question: turn.answer for turn in asked("bar", page())}
    assert found['What is the value of "Q1"?'] == "7"
    assert found['Which one has the value "7"?'] == "Q1"


@pytest.mark.parametrize("kind", questions.KINDS)
def test_a_blank_page_has_no_questions(kind: str) -> None:
    blank = Page("b", "article_test", "Test", Image.new("RGB", (64, 64)), Content("article", ""), (), {})
    assert list(asked(kind, blank, 20)) == []


def test_the_evidence_has_the_nearest_label() -> None:
    """The label stands twice; the one beside the value tells what it is."""
    printed = (*words("Amount due:", "", 400), *words("Amount due:", "", 21), *page().words)
    shown = Page("p", "t", "T", page().image, CONTENT, printed, page().places)
    near = shown.words[2].box[1]
    found = next(turn for turn in asked("field", shown) if turn.answer == "€ 12.50")
    assert found.focus[0] == shown.places["field:total"]
    assert [box[1] for box in found.focus[1:]] == [near]
