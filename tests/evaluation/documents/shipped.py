"""A folder of small pages as the package fovea-page has them, without any renderer."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from fovea.evaluation.documents.content import Content, Field, Series, Table
from fovea.evaluation.documents.page import Page, Word, places_of
from fovea.evaluation.documents.store import write


def words(left: float, top: float, text: str, at: str, size: int = 16) -> list[Word]:
    """The words of a text, `size` pixels high and half as wide per character."""
    made = []
    for part in text.split():
        right = left + len(part) * size / 2
        made.append(Word(part, (left, top, right, top + size), (), at))
        left = right + size / 2
    return made


def invoice(number: int, size: int = 16) -> Page:
    """A page with three fields, a table of three rows and a line of text."""
    fields = (
        Field("invoice_number", "Invoice No.", f"INV-{number}7", "code"),
        Field("total", "Total", f"$ {number}1.50", "amount"),
        Field("due_date", "Due", f"2026-01-1{number}", "date"),
    )
    rows = tuple((f"Thing{number}{row}", f"{number}{row}") for row in range(3))
    line = f"Thanks number{number} for buying things here"
    content = Content("invoice", f"Bill {number}", fields, (Table(("Item", "Qty"), rows, "item"),), (line,))
    some = words(10, 5, content.title, "title", 2 * size)
    for place, field in enumerate(fields):
        some += words(10, 50 + 24 * place, field.label, "", size)
        some += words(160, 50 + 24 * place, field.value, f"field:{field.key}", size)
    for r, row in enumerate(rows):
        for c, text in enumerate(row):
            some += words(10 + 150 * c, 130 + 24 * r, text, f"cell:0:{r}:{c}", size)
    some += words(10, 220, line, "paragraph:0", size)
    image = Image.new("RGB", (320, 256), (255, 255, 200 + number))
    return Page(
        f"invoice_a/Go/{number}", "invoice_a", "Go", image, content, tuple(some), places_of(tuple(some))
    )


def chart(number: int) -> Page:
    """A page with three bars."""
    values = tuple((f"Q{number}{bar}", f"{number}{bar}0") for bar in range(3))
    content = Content("chart", f"Sales {number}", series=(Series("Sales", values),))
    some = words(10, 5, content.title, "title")
    for place, (name, value) in enumerate(values):
        some += words(10 + 80 * place, 100, value, f"bar:0:{place}", 13)
        some += words(10 + 80 * place, 200, name, "", 13)
    image = Image.new("RGB", (256, 224), "white")
    name = f"chart_bars/Cabin/{number}/scanned"
    return Page(name, "chart_bars", "Cabin", image, content, tuple(some), places_of(tuple(some)))


def fill(folder: Path) -> Path:
    """Write six invoices, two of them with small text, and three scanned charts; return the folder."""
    pages = [invoice(number, 12 if number > 3 else 16) for number in range(6)] + [chart(n) for n in range(3)]
    for number, page in enumerate(pages):
        write(page, folder, f"{number:03d}", "webp", lossless=True)
    return folder
