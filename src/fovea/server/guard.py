"""Checks the size of every body, and on protected paths the API key and whether the server is draining.

For protected paths it also measures the time. It is plain ASGI middleware, so that a body over the limit
is refused while it arrives, and a stream passes through unchanged.
"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fovea.core.errors import FoveaError, PayloadTooLarge, Unavailable
from fovea.server.errors import refusal
from fovea.server.keys import PROTECTED, Keys
from fovea.server.settings import MIB
from fovea.server.state import ServerState

CLIENT_GONE = 499
"""Status in the metrics of a request whose client disconnected before the answer began. It is never sent."""


class Guard:
    """ASGI middleware that checks every request before its route runs.

    Refuses a wrong key with 401, a body over the limit with 413, and a POST to a server that is loading or
    draining with 503.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app = app
        self.state = state
        self.limit = state.settings.bodies.max_body_mib * MIB
        self._keys = Keys(state.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500
        answered = False

        async def record(message: Message) -> None:
            nonlocal status, answered
            if message["type"] == "http.response.start":
                status, answered = message["status"], True
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, self._limited(receive), record)
            status = status if answered else CLIENT_GONE
        except FoveaError as error:
            if answered:
                raise
            await refusal(error, self.state.metrics)(scope, receive, record)
        finally:
            if scope["path"].startswith(PROTECTED):
                route = getattr(scope.get("route"), "path", "unknown")
                self.state.metrics.observe_request(route, status, time.perf_counter() - started)

    def _check(self, scope: Scope) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        if scope["path"].startswith(PROTECTED):
            tenant = self._keys.admit(scope["path"], headers.get(b"authorization", b""))
            scope.setdefault("state", {})["tenant"] = tenant
            reason = self.state.unavailable() if scope["method"] == "POST" else None
            if reason is not None:
                raise Unavailable(reason)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limit:
            raise PayloadTooLarge(
                f"the body has {int(length)} bytes; "
                f"accepted: at most {self.limit} bytes ({self.limit // MIB} MiB)"
            )

    def _limited(self, receive: Receive) -> Receive:
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self.limit:
                    raise PayloadTooLarge(
                        f"the body has more than {self.limit} bytes ({self.limit // MIB} MiB)"
                    )
            return message

        return receive_limited
