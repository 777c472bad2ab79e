"""Receives JSON bodies: refuses them by their headers, and cuts them while they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from email.message import Message
from typing import Any

from fovea.api.cutter import Cutter
from fovea.core.errors import InvalidRequest, PayloadTooLarge
from fovea.http.body_budget import BodyBudget, Claim
from fovea.http.errors import ClientGone

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""Returns the next message of a request, as ASGI's `receive`."""
MIB = 1024 * 1024
SLICE = 64 * 1024
"""Bytes that are cut between two passes of the event loop, a millisecond or two at most."""


class UnsupportedEncoding(InvalidRequest):
    """The body is compressed."""

    status = 415
    default_code = "unsupported_encoding"


def check_body_headers(encoding: str, content_type: str, length: str, largest: int) -> None:
    """Check the headers of a request whose body has to be JSON.

    encoding, content_type, length: values of Content-Encoding, Content-Type and Content-Length; "": the
        request has no such header.
    largest: most bytes of the body.
    Raises UnsupportedEncoding, InvalidRequest and PayloadTooLarge.
    """
    encoding = encoding.strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedEncoding(
            f"the body has the Content-Encoding {encoding[:40]!r}; accepted: bodies that are not compressed"
        )
    if content_type != "application/json" and not _is_json(content_type):
        raise InvalidRequest(
            "the body must be JSON, sent as Content-Type: application/json", code="invalid_json"
        )
    if length.isdecimal() and int(length) > largest:
        raise PayloadTooLarge(
            f"the body has {int(length)} bytes; accepted: at most {largest} bytes ({largest // MIB} MiB)"
        )


async def receive_body(receive: Receive, claim: Claim, budget: BodyBudget) -> Cutter:
    """Cut a body while it arrives.

    claim: counts its bytes.
    Raises PayloadTooLarge, InvalidRequest, Overloaded, and ClientGone if the client disconnects.
    """
    cutter = Cutter()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        data = message.get("body", b"")
        if cutter.size + len(data) > budget.largest:
            raise PayloadTooLarge(
                f"the body has more than {budget.largest} bytes ({budget.largest // MIB} MiB)"
            )
        claim.add(len(data))
        for at in range(0, len(data), SLICE):
            if at:
                await asyncio.sleep(0)
            cutter.feed(data[at : at + SLICE])
        if not message.get("more_body", False):
            return cutter


def _is_json(content_type: str) -> bool:
    kind = Message()
    kind["content-type"] = content_type or "text/plain"
    subtype = kind.get_content_subtype()
    return kind.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
