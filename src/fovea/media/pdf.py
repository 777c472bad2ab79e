"""Renders pages of a PDF file with PDFium. A server does it in a process of its own: `media.sandbox`.

Text, vector graphics and images of a page are drawn; forms with their values and annotations, too. Scripts
are not run: this build of PDFium has no interpreter for them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fovea.core.errors import InvalidMedia, InvalidRequest, Unavailable
from fovea.core.names import install_command

MAGIC = b"%PDF-"
HEADER_BYTES = 1024
"""A file is a PDF if the magic is within its first bytes."""
QUALITY = 92
POINTS_PER_INCH = 72
LARGEST_SCALE = 400 / POINTS_PER_INCH
"""Pixels per point at most: a tiny page is not enlarged without end."""
UNAVAILABLE = "pdf_unavailable"


class InvalidPdf(InvalidMedia):
    """A PDF file cannot be used."""

    noun = "PDF"
    default_code = "invalid_pdf"


@dataclass(frozen=True, slots=True)
class PageRange:
    """The pages to render.

    first, last: numbers from 1, both included; a last one beyond the end means the last page.
    max_side: pixels of a page's longer side.
    most: number of pages that may be rendered.
    """

    first: int = 1
    last: int = 16
    max_side: int = 1344
    most: int = 32


@dataclass(frozen=True, slots=True)
class Page:
    """A rendered page.

    number: from 1. width, height: pixels. jpeg: the picture as a JPEG file.
    """

    number: int
    width: int
    height: int
    jpeg: bytes


def check_magic(data: bytes | memoryview) -> None:
    """Raise InvalidPdf if the bytes are not a PDF file."""
    if MAGIC not in bytes(data[:HEADER_BYTES]):
        raise InvalidPdf("the file is not a PDF: %PDF- is not at its beginning", code="not_a_pdf")


class Document:
    """An open PDF file. Use it in a `with` block.

    Raises InvalidPdf for a file that cannot be read or needs a password, Unavailable if pypdfium2 is missing.
    """

    def __init__(self, data: bytes) -> None:
        check_magic(data)
        pdfium = _pdfium()
        try:
            self._file = pdfium.PdfDocument(data)
        except pdfium.PdfiumError as error:
            if "password" in str(error).lower():
                raise InvalidPdf(
                    "the PDF needs a password; accepted: files that open without one", code="pdf_encrypted"
                ) from error
            raise InvalidPdf("the PDF is damaged and cannot be opened") from error
        self._error = pdfium.PdfiumError
        self.pages = len(self._file)
        if self.pages and self._file.get_formtype():
            self._file.init_forms()

    def __enter__(self) -> Document:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def render(self, wanted: PageRange) -> Iterator[Page]:
        """Yield the wanted pages.

        Raises InvalidRequest if the first one is beyond the end, or if there are too many, and InvalidPdf.
        """
        if wanted.first > self.pages:
            raise InvalidRequest(
                f"first is {wanted.first}; the PDF has {self.pages} pages", param="first", code="no_such_page"
            )
        last = min(wanted.last, self.pages)
        if last - wanted.first >= wanted.most:
            raise InvalidRequest(
                f"last is {wanted.last} with first {wanted.first}, and the PDF has {self.pages} pages; "
                f"accepted: up to {wanted.first + wanted.most - 1} (max_pdf_pages is {wanted.most})",
                param="last",
                code="too_many_pages",
            )
        for number in range(wanted.first, last + 1):
            try:
                yield self._page(number, wanted.max_side)
            except self._error as error:
                raise InvalidPdf(f"page {number} of the PDF cannot be drawn") from error

    def _page(self, number: int, max_side: int) -> Page:
        page = self._file[number - 1]
        try:
            width, height = page.get_size()
            if not 0 < width < 1e6 or not 0 < height < 1e6:
                raise InvalidPdf(f"page {number} of the PDF has the size {width:g} x {height:g} points")
            # PDFium rounds sizes up, so a little less keeps the longer side within max_side.
            scale = min((max_side - 0.01) / max(width, height), LARGEST_SCALE)
            bitmap = page.render(scale=scale, may_draw_forms=True)
            picture = bitmap.to_pil().convert("RGB")
        finally:
            page.close()
        out = io.BytesIO()
        picture.save(out, "JPEG", quality=QUALITY, subsampling=0)
        return Page(number, picture.width, picture.height, out.getvalue())


def warm_up() -> None:
    """Draw a page, so that everything that PDFium opens is open. Raises Unavailable."""
    pdfium = _pdfium()
    empty = pdfium.PdfDocument.new()
    empty.new_page(72, 72)
    out = io.BytesIO()
    empty.save(out)
    with Document(out.getvalue()) as document:
        list(document.render(PageRange(max_side=32)))


def _pdfium() -> Any:
    try:
        import pypdfium2
    except ImportError as error:
        raise Unavailable(
            f"PDF files need the package pypdfium2 at the server: {install_command('pdf')}", code=UNAVAILABLE
        ) from error
    return pypdfium2
