"""Calls the server's own routes from within, as a client whose key was checked before."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Scope

from fovea.api.bodies.errors import DEFECT, error_body
from fovea.core.errors import EngineError
from fovea.server.access.caller import Caller

log = logging.getLogger("fovea.server")
CALLER = "fovea.caller"
"""Key of the ASGI scope with the caller of such a call. Nothing that arrives by the network sets it."""


class Reply(NamedTuple):
    """The answer to a call.

    retry_after: seconds of the header Retry-After; None: there is none.
    """

    status: int
    body: bytes
    request_id: str
    retry_after: float | None


async def call(app: ASGIApp, path: str, body: bytes, caller: Caller) -> Reply:
    """Send a request to a route of the application, and return its answer."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", caller.request_id.encode()),
        ],
        "client": None,
        "server": None,
        CALLER: caller,
    }
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, headers, parts = 500, dict[bytes, bytes](), list[bytes]()

    async def receive() -> Message:
        if requests:
            return requests.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # never leaves

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception as error:  # the application has answered with status 500, or has not answered
        log.error("a request from within failed", exc_info=error)
        if not parts:
            status, headers = 500, {}
            parts.append(json.dumps(error_body(EngineError(DEFECT))).encode())
    wait = headers.get(b"retry-after", b"").decode()
    request_id = headers.get(b"x-request-id", b"").decode()
    return Reply(status, b"".join(parts), request_id, float(wait) if wait.isdecimal() else None)
