"""/v1/images/pdf: the pages of a PDF file as pictures, to be sent back as images of a request."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable

from pydantic import BaseModel, Field

from fovea.api.explain import shorten
from fovea.core.errors import InvalidRequest, PayloadTooLarge
from fovea.media.pdf import PageRange
from fovea.media.sandbox.decoder import DocumentPages
from fovea.server.request import Request
from fovea.server.routing import Response, Routes

routes = Routes()
MEDIA_TYPE = "application/pdf"
SMALLEST_SIDE, LARGEST_SIDE = 64, 4096
_BODY = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}


class Pages(BaseModel):
    """The pages to be drawn."""

    first: int = Field(1, ge=1, description="Number of the first page, from 1.")
    last: int | None = Field(
        None,
        ge=1,
        description="Number of the last page; one beyond the end means the last page. Without it, as many as "
        "one call may draw.",
    )
    max_side: int = Field(
        1344, ge=SMALLEST_SIDE, le=LARGEST_SIDE, description="Pixels of a page's longer side."
    )


@routes.post("/v1/images/pdf", query=Pages, upload=_BODY)
async def render(request: Request, pages: Pages) -> Response:
    """Render pages of the PDF file that is the body, as JPEG pictures in data: URLs."""
    state, first, last = request.state, pages.first, pages.last
    most = state.settings.media.max_pdf_pages
    end = first + most - 1 if last is None else last
    if end < first:
        raise InvalidRequest(f"last is {end}; accepted: at least first, which is {first}", param="last")
    kind = request.header(b"content-type").partition(";")[0].strip().lower()
    if kind != MEDIA_TYPE:
        raise InvalidRequest(
            f"the body is {shorten(kind or 'of no type')}; accepted: {MEDIA_TYPE}", param="content-type"
        )
    state.engine.info.check_media("PDF file", "body")
    deadline, caller = request.deadline(), request.caller
    wanted = PageRange(first, end, pages.max_side, most)
    data = await request.receive_within(
        state.bodies,
        caller.client.name,
        lambda memory: receive_file(request, state.bodies.largest, memory.add),
    )
    work = state.drawing.render(caller.client.name, data, wanted, caller.tenant)
    rendered = await deadline.limit(work, "its PDF was drawn")
    return Response(await asyncio.to_thread(_answer, rendered))


async def receive_file(request: Request, largest: int, arrived: Callable[[int], None]) -> bytes:
    """Receive the body of a request.

    largest: most bytes. arrived: called with the bytes of each piece.
    Raises PayloadTooLarge, ClientGone, and what `arrived` raises.
    """
    length = request.header(b"content-length")
    if length.isdecimal() and (len(length) >= 16 or int(length) > largest):
        raise _too_large(largest)
    data = bytearray()
    while True:
        message = await request.receive()
        piece = message.get("body", b"")
        arrived(len(piece))
        data += piece
        if len(data) > largest:
            raise _too_large(largest)
        if not message.get("more_body"):
            return bytes(data)


def _too_large(largest: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the file has more than {largest} bytes; accepted: at most {largest} (max_body_mib)"
    )


def _answer(rendered: DocumentPages) -> bytes:
    """Return the response's JSON, page by page, because nothing else runs while a piece is written."""
    pieces = [b'{"object":"list","pages":%d,"data":[' % rendered.total]
    for number, page in enumerate(rendered.pages):
        pieces.append(
            b'%s{"page":%d,"width":%d,"height":%d,"image_url":"data:image/jpeg;base64,'
            % (b"," if number else b"", page.number, page.width, page.height)
        )
        pieces += [base64.b64encode(page.jpeg), b'"}']
    return b"".join([*pieces, b"]}"])
