"""/v1/images/pdf: the pages of a PDF file as pictures, to be sent back as images of a request."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from fovea.api.explain import shorten
from fovea.core.errors import InvalidRequest, PayloadTooLarge
from fovea.http.refusals import ClientGone
from fovea.media.pdf.pages import PageRange
from fovea.media.sandbox.documents import DocumentPages
from fovea.server.answer import Deadline, while_connected
from fovea.server.docs import ERRORS
from fovea.server.state import state_of

router = APIRouter()
MEDIA_TYPE = "application/pdf"
SMALLEST_SIDE, LARGEST_SIDE = 64, 4096
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.post("/v1/images/pdf", responses=ERRORS, openapi_extra=_BODY)
async def render(
    http: Request,
    first: Annotated[int, Query(ge=1)] = 1,
    last: Annotated[int | None, Query(ge=1)] = None,
    max_side: Annotated[int, Query(ge=SMALLEST_SIDE, le=LARGEST_SIDE)] = 1344,
) -> Response:
    """Render pages of the PDF file that is the body, as JPEG pictures in data: URLs.

    first, last: numbers of pages, from 1; without `last`, as many as one call may render. A `last` beyond the
        end means the last page.
    max_side: pixels of a page's longer side.
    """
    state = state_of(http)
    most = state.settings.media.max_pdf_pages
    end = first + most - 1 if last is None else last
    if end < first:
        raise InvalidRequest(f"last is {end}; accepted: at least first, which is {first}", param="last")
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != MEDIA_TYPE:
        raise InvalidRequest(
            f"the body is {shorten(kind or 'of no type')}; accepted: {MEDIA_TYPE}", param="content-type"
        )
    deadline = Deadline(state.timeout(None))
    wanted = PageRange(first, end, max_side, most)
    with state.bodies.claim(state.caller.client.name, lambda: waiting.reschedule(0)) as claim:
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                data = await receive_file(http, state.bodies.largest, claim.add)
                claim.arrived()
        except TimeoutError:
            raise state.bodies.overloaded() from None
        work = state.drawing.render(state.caller.client.name, data, wanted, state.caller.tenant)
        rendered = await while_connected(http, deadline.limit(work, "its PDF was drawn"))
    return Response(await asyncio.to_thread(_answer, rendered), media_type="application/json")


async def receive_file(http: Request, largest: int, arrived: Callable[[int], None]) -> bytes:
    """Receive the body of a request.

    largest: most bytes. arrived: called with the bytes of each piece.
    Raises PayloadTooLarge, ClientGone, and what `arrived` raises.
    """
    length = http.headers.get("content-length", "")
    if length.isdecimal() and (len(length) >= 16 or int(length) > largest):
        raise _too_large(largest)
    data = bytearray()
    while True:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
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
