"""One HTTP request to the gateway and its answer, over ASGI."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from fovea.access.log import request_id
from fovea.api.errors import error_body, error_headers
from fovea.core.errors import FoveaError
from fovea.gateway.inspect.body import Body
from fovea.gateway.translate.translation import ChatTranslation
from fovea.http.bodies import BodyBudget, Claim, Receive, check_body_headers, receive_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Exchange:
    """One request and its answer.

    headers: of the request, names in lower case; of several with one name, the first.
    request_id: from x-request-id, or new.
    status: status of the answer; 0: none was sent yet.
    extra: headers of the gateway for the answer.
    send: ASGI's own; `start`, `write` and `reply` use it.
    """

    __slots__ = ("_receive", "extra", "headers", "request_id", "scope", "send", "status")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self.send = send
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self.request_id = request_id(self.headers.get(b"x-request-id", b""))
        self.status = 0
        self.extra: dict[str, str] = {}

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def authorization(self) -> bytes:
        """The header with the key, also if it came in x-api-key, as Anthropic's clients send it."""
        given = self.headers.get(b"authorization", b"")
        other = b"" if given else self.headers.get(b"x-api-key", b"")
        return b"Bearer " + other if other else given

    def header(self, name: bytes) -> str:
        """A header of the request; "" if it has none."""
        return self.headers.get(name, b"").decode("latin-1")

    async def body(self, budget: BodyBudget, claim: Claim) -> Body:
        """Receive and parse the body.

        claim: counts its bytes.
        Raises PayloadTooLarge, InvalidRequest, Overloaded, and ClientGone.
        """
        check_body_headers(
            self.header(b"content-encoding"),
            self.header(b"content-type"),
            self.header(b"content-length"),
            budget.largest,
        )
        cutter = await receive_body(self._receive, claim, budget)
        claim.arrived()
        return Body.parse(cutter)

    async def disconnected(self) -> None:
        """Return when the client has closed its connection, or has got its answer."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the status and the headers."""
        self.status = status
        merged = {**headers, **self.extra, "x-request-id": self.request_id}
        pairs = [(name.encode("latin-1"), _latin(value)) for name, value in merged.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send bytes of the body. more: whether further ones follow."""
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def reply(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete answer."""
        kind = {"content-type": "application/json", "content-length": str(len(body))}
        await self.start(status, {**kind, **(headers or {})})
        await self.write(body, more=False)

    async def reply_json(self, value: Any, status: int = 200) -> None:
        """Send a complete answer of JSON."""
        await self.reply(status, json.dumps(value).encode())

    async def refuse(self, error: FoveaError, translation: ChatTranslation | None = None) -> None:
        """Send an error, in the form of the API that was called.

        translation: knows the names of fields in that API; None: they are those of chat requests.
        """
        kind = {"type": "error"} if self.path.startswith("/v1/messages") else {}
        body = {**kind, **error_body(error)} if translation is None else translation.refusal(error)
        await self.reply(error.status, json.dumps(body).encode(), error_headers(error))


def _latin(value: str) -> bytes:
    """Encode a header's value. What it cannot hold, line ends above all, becomes "?"."""
    return value.replace("\r", "?").replace("\n", "?").encode("latin-1", "replace")
