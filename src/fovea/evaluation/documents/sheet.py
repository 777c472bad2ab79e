"""Sheets: several documents side by side on one large page, with the facts of all of them.

No fact of one document may be taken for one of another: their keys, labels, columns and names differ. A sheet
has no title, because each of its documents has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

from PIL import Image

from fovea.evaluation.documents.content import Content
from fovea.evaluation.documents.fields import ALIKE
from fovea.evaluation.documents.page import Box, Page, Word

Size = tuple[int, int]
"""Width and height in pixels."""
GAP = 16
"""Pixels around each document."""
NAME = "sheet"
"""The template of sheets, and the kind of their content."""


def sheet(
    rng: Random, candidates: Iterable[Page], size: Size, most: int = 5
) -> tuple[Page, list[Page]] | None:
    """A page of `size` with up to `most` of the candidates, and the candidates that are on it.

    Each candidate is placed if there is room for it and if its facts cannot be taken for those that are
    there. Returns None if fewer than two are placed.
    """
    free: list[Box] = [(0, 0, *size)]
    placed: list[tuple[Page, Size]] = []
    for page in candidates:
        distinct = all(tell_apart(page.content, other.content) for other, _ in placed)
        if len(placed) < most and distinct and (at := _room(free, page.image.size)) is not None:
            placed.append((page, at))
    if len(placed) < 2:
        return None
    desk = rng.choice((rng.randint(40, 110), rng.randint(150, 235)))
    image = Image.new(
        "RGB", size, (desk, max(0, desk - rng.randint(0, 12)), max(0, desk - rng.randint(0, 20)))
    )
    for page, at in placed:
        image.paste(page.image, at)
    return _joined(image, placed), [page for page, _ in placed]


def tell_apart(one: Content, other: Content) -> bool:
    """Whether no question about one document could be answered from the other. Of two charts, one could."""
    if one.series and other.series:
        return False
    groups = [
        {number for number, keys in enumerate(ALIKE) if _keys(each) & set(keys)} for each in (one, other)
    ]
    return not (groups[0] & groups[1] or _keys(one) & _keys(other) or _names(one) & _names(other))


def _keys(content: Content) -> set[str]:
    return {field.key for field in content.fields}


def _names(content: Content) -> set[str]:
    """All names by which questions refer to facts, in small letters."""
    names = [field.label for field in content.fields]
    for table in content.tables:
        names += [*table.columns, *(row[0] for row in table.rows)]
    for series in content.series:
        names += [text for value in series.values for text in value]
    return {name.lower() for name in names}


def _room(free: list[Box], size: Size) -> Size | None:
    """Take a place for a picture from the free boxes, and return its left and top; None: there is no room."""
    width, height = size[0] + GAP, size[1] + GAP
    for box in sorted(free, key=lambda box: (box[2] - box[0]) * (box[3] - box[1])):
        left, top, right, bottom = box
        if right - left >= width + GAP and bottom - top >= height + GAP:
            free.remove(box)
            free += [(left + width, top, right, bottom), (left, top + height, left + width, bottom)]
            return int(left) + GAP, int(top) + GAP
    return None


def _joined(image: Image.Image, placed: Sequence[tuple[Page, Size]]) -> Page:
    pages = [page for page, _ in placed]
    words: list[Word] = []
    places: dict[str, Box] = {}
    tables = paragraphs = series = 0
    for page, (left, top) in placed:
        before = {"cell": tables, "paragraph": paragraphs, "bar": series}
        for word in page.words:
            box = _shifted(word.box, left, top)
            starts = tuple(start + left for start in word.starts)
            words.append(replace(word, box=box, starts=starts, at=_renamed(word.at, before)))
        for at, box in page.places.items():
            places[_renamed(at, before)] = _shifted(box, left, top)
        tables += len(page.content.tables)
        paragraphs += len(page.content.paragraphs)
        series += len(page.content.series)
    places.pop("", None)
    name = "+".join(page.template for page in pages)
    return Page(f"{NAME}/{name}", NAME, pages[0].font, image, _content(pages), tuple(words), places)


def _content(pages: Sequence[Page]) -> Content:
    every = [page.content for page in pages]
    return Content(
        NAME,
        every[0].title,
        tuple(field for one in every for field in one.fields),
        tuple(table for one in every for table in one.tables),
        tuple(text for one in every for text in one.paragraphs),
        tuple(each for one in every for each in one.series),
    )


def _renamed(at: str, before: dict[str, int]) -> str:
    """The name of a fact on the sheet: tables, paragraphs and series are counted on; "" for titles."""
    sort, _, rest = at.partition(":")
    if sort not in before:
        return "" if sort == "title" else at
    number, _, rest = rest.partition(":")
    return ":".join(filter(None, (sort, str(int(number) + before[sort]), rest)))


def _shifted(box: Box, left: int, top: int) -> Box:
    return box[0] + left, box[1] + top, box[2] + left, box[3] + top
