"""Renders PDF files in a worker process. There is no way to do it in the server itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import NamedTuple

from fovea.core.errors import FoveaError, InvalidRequest, Unavailable
from fovea.core.image import Rgb
from fovea.core.video import Abandoned
from fovea.media.limits import MIB, MediaLimits
from fovea.media.pdf.pages import UNAVAILABLE, InvalidPdf, Page, PageRange, check_magic
from fovea.media.sandbox.decoder import ask_worker
from fovea.media.sandbox.messages import Message
from fovea.media.sandbox.pool import WorkerPool
from fovea.media.sandbox.process import WorkerFailed

ROOM = 16 * MIB
"""Most bytes of one rendered page as a JPEG file."""
MOST_BYTES = 48 * MIB
"""Most bytes of all pages of one call together."""


class DocumentPages(NamedTuple):
    """Pages of a document as pictures.

    pages: the pages that were asked for.
    total: number of all pages of the document.
    """

    pages: list[Page]
    total: int


_PARAMS = {"no_such_page": "first", "too_many_pages": "last"}
"""The wrong parameter of a request, by the code of its error."""


class DocumentRenderer:
    """Renders documents in processes that start with the first one. Thread-safe; `render` blocks.

    limits: its `pdf_workers` is the number of processes; 0: PDF files are refused.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._pool = WorkerPool("pdf", limits.pdf_workers, limits) if limits.pdf_workers else None

    def render(
        self, data: bytes, wanted: PageRange, abandoned: Callable[[], bool] = lambda: False, tenant: str = ""
    ) -> DocumentPages:
        """Render pages of a PDF file.

        tenant: whose file it is; tenants share no process.
        abandoned: whether nobody waits for the pages any more; then the process that draws them is ended.
        Raises InvalidRequest for pages that are not there or too many of them, InvalidPdf, Unavailable,
        Abandoned.
        """

        def stop_if_abandoned() -> None:
            if abandoned():
                raise Abandoned

        if self._pool is None:
            raise Unavailable("PDF files are not accepted here (pdf_workers is 0)", code=UNAVAILABLE)
        check_magic(data)
        pages: list[Page] = []
        left = MOST_BYTES
        question = {"ask": "pages", **asdict(wanted)}
        try:
            answers = ask_worker(
                self._pool, question, data, self._limits.pdf_render_s,
                room=ROOM, each_wait=stop_if_abandoned, tenant=tenant,
            )  # fmt: skip
            with closing(answers):
                for answer, output in answers:
                    if "frame" in answer and len(pages) < wanted.most:
                        pages.append(_page(answer, output()))
                        left -= len(pages[-1].jpeg)
                        _check_left(left, len(pages), wanted)
                    elif "done" in answer:
                        return DocumentPages(pages, int(answer["total"]))
                    else:
                        raise _error_of(answer)
        except WorkerFailed as error:
            raise InvalidPdf(f"the PDF cannot be drawn: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidPdf("the PDF cannot be drawn: its decoder answered what cannot be read") from error
        raise InvalidPdf("the PDF cannot be drawn: its decoder ended too early")

    def close(self) -> None:
        """End all processes, and cancel the calls that wait."""
        if self._pool is not None:
            self._pool.close()


def _page(answer: Message, output: Rgb) -> Page:
    size = int(answer["bytes"])
    if not 0 < size <= len(output):
        raise ValueError(size)
    return Page(int(answer["number"]), int(answer["width"]), int(answer["height"]), bytes(output[:size]))


def _check_left(left: int, drawn: int, wanted: PageRange) -> None:
    if left < 0:
        raise InvalidRequest(
            f"{drawn} pages with max_side {wanted.max_side} have more than {MOST_BYTES // MIB} MiB as "
            "pictures; accepted: fewer pages in one call, or a smaller max_side",
            param="max_side",
            code="pages_too_large",
        )


def _error_of(answer: Message) -> FoveaError:
    code, message = str(answer.get("code")), str(answer.get("error", "it cannot be drawn"))[:300]
    if code == UNAVAILABLE:
        return Unavailable(message, code=code)
    if code in _PARAMS:
        return InvalidRequest(message, param=_PARAMS[code], code=code)
    known = code if code in ("not_a_pdf", "pdf_encrypted") else None
    return InvalidPdf(message, code=known)
