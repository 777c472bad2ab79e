"""/v1/images/pdf: the pages of a PDF file as pictures, to be sent back as images of a request."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from fovea.api.explain import shorten
from fovea.core.errors import InvalidRequest, PayloadTooLarge
from fovea.http.errors import ClientGone
from fovea.media.pdf.pages import PageRange
from fovea.media.sandbox.documents import DocumentPages
from fovea.server.answer import Deadline, while_connected
from fovea.server.docs import ERRORS
from fovea.server.state import ServerState, state_of

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
) -> dict[str, Any]:
    """Render pages of the PDF file that is the body, as JPEG pictures in data: URLs.

    first, last: numbers of pages, from 1; without `last`, as many as one call may render.
    max_side: pixels of a page's longer side.
    """
    state = state_of(http)
    most = state.settings.media.max_pdf_pages
    end = first + most - 1 if last is None else last
    if not first <= end < first + most:
        raise InvalidRequest(
            f"last is {end} with first {first}; accepted: {first} to {first + most - 1} "
            f"(max_pdf_pages is {most})",
            param="last",
        )
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != MEDIA_TYPE:
        raise InvalidRequest(
            f"the body is {shorten(kind or 'of no type')}; accepted: {MEDIA_TYPE}", param="content-type"
        )
    deadline = Deadline(state.timeout(None))
    wanted = PageRange(first, end, max_side)
    with state.bodies.claim(state.caller.client.name, lambda: waiting.reschedule(0)) as claim:
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                data = await _body(http, state, claim.add)
                claim.arrived()
        except TimeoutError:
            raise state.bodies.overloaded() from None
        work = asyncio.wrap_future(state.documents.submit(data, wanted))
        rendered = await while_connected(http, deadline.limit(work, "its PDF was drawn"))
    return await asyncio.to_thread(_answer, rendered)


async def _body(http: Request, state: ServerState, count: Callable[[int], None]) -> bytes:
    """Receive the file.

    count: called with the number of bytes of each piece.
    Raises PayloadTooLarge, ClientGone, and what `count` raises.
    """
    largest = state.bodies.largest
    length = http.headers.get("content-length", "")
    size = int(length) if length.isdecimal() and len(length) < 16 else 0
    received = 0
    pieces: list[bytes] = []
    while max(size, received) <= largest:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        received += len(piece)
        count(len(piece))
        pieces.append(piece)
        if not message.get("more_body") and received <= largest:
            return b"".join(pieces)
    raise PayloadTooLarge(
        f"the file has more than {largest} bytes; accepted: at most {largest} (max_body_mib)"
    )


def _answer(rendered: DocumentPages) -> dict[str, Any]:
    return {
        "object": "list",
        "pages": rendered.total,
        "data": [
            {
                "page": page.number,
                "width": page.width,
                "height": page.height,
                "image_url": "data:image/jpeg;base64," + base64.b64encode(page.jpeg).decode(),
            }
            for page in rendered.pages
        ],
    }
