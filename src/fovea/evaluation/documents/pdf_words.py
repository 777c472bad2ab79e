"""Words of a PDF page with the place of every character, and the links that they belong to."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from fovea.core.errors import ConfigError
from fovea.evaluation.documents.page import Box, Word, bounds

SCHEME = "fovea://"
LINE_END_HYPHEN = "\x02"
"""PDFium's sign for a hyphen at the end of a line."""

GAP = 0.12
"""A space between two characters that parts words, as a share of their height."""

Links = tuple[tuple[str, Box], ...]
"""Addresses and places of a page's links; a link of several lines has one place for each."""
Run = list[tuple[str, Box, str]]
"""Characters that stand next to each other, with their boxes in pixels, and the address of their link."""


def read_words(pdf: bytes, scale: float) -> tuple[Word, ...]:
    """The words of the first page, in the order of its text.

    scale: pixels of the picture in one point of the PDF. A word's `at` is the address of the link around it,
    without the scheme `fovea://`. Raises ConfigError if pypdfium2 is missing.
    """
    try:
        import pypdfium2
    except ModuleNotFoundError as error:
        raise ConfigError("the words of a PDF are read by pypdfium2: pip install pypdfium2") from error
    with pypdfium2.PdfDocument(pdf) as document:
        page = document[0]
        links = tuple(_links(pypdfium2.raw, page, scale))
        return tuple(_word(run) for run in _runs(pypdfium2.raw, page, scale, links))


def _runs(raw: Any, page: Any, scale: float, links: Links) -> Iterator[Run]:
    """Split the characters of a page at white space, at the ends of links and at new lines or columns."""
    text, height, run = page.get_textpage(), page.get_height(), Run()
    for index in range(text.count_chars()):
        sign = chr(raw.FPDFText_GetUnicode(text, index)).replace(LINE_END_HYPHEN, "-")
        box = _pixels(text.get_charbox(index, loose=True), scale, height)
        link = _link_at(links, (box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        if run and (sign.isspace() or link != run[-1][2] or _apart(run[-1][1], box)):
            yield run
            run = []
        if not sign.isspace():
            run.append((sign, box, link))
    if run:
        yield run


def _apart(before: Box, box: Box) -> bool:
    """Tell whether a character is not the next one of the same word."""
    high = before[3] - before[1]
    return abs(box[3] - before[3]) > high / 2 or not -high / 2 < box[0] - before[2] < high * GAP


def _word(run: Run) -> Word:
    boxes = [box for _, box, _ in run]
    return Word("".join(sign for sign, _, _ in run), bounds(boxes), tuple(box[0] for box in boxes), run[0][2])


def _link_at(links: Links, across: float, down: float) -> str:
    return next((name for name, box in links if box[0] <= across <= box[2] and box[1] <= down <= box[3]), "")


def _links(raw: Any, page: Any, scale: float) -> Iterator[tuple[str, Box]]:
    position, link, rectangle = ctypes.c_int(0), raw.FPDF_LINK(), raw.FS_RECTF()
    while raw.FPDFLink_Enumerate(page, position, link):
        if raw.FPDFLink_GetAnnotRect(link, rectangle):
            sides = (rectangle.left, rectangle.bottom, rectangle.right, rectangle.top)
            address = _address(raw, page, link)
            if address.startswith(SCHEME):
                yield address.removeprefix(SCHEME), _pixels(sides, scale, page.get_height())


def _address(raw: Any, page: Any, link: Any) -> str:
    action = raw.FPDFLink_GetAction(link)
    length = raw.FPDFAction_GetURIPath(page.pdf, action, None, 0)
    buffer = ctypes.create_string_buffer(length)
    raw.FPDFAction_GetURIPath(page.pdf, action, buffer, length)
    return buffer.value.decode()


def _pixels(sides: tuple[float, float, float, float], scale: float, height: float) -> Box:
    """A box in pixels from the top. sides: left, bottom, right and top in points from the bottom."""
    left, bottom, right, top = sides
    return (left * scale, (height - top) * scale, right * scale, (height - bottom) * scale)
