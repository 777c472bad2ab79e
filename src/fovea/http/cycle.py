"""One request and its answer on a connection, as the application sees them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from fovea.http.refusals import DEFECT, SHUTTING_DOWN, Refusal

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGISendEvent, HTTPScope
    from uvicorn.server import ServerState

    from fovea.http.flow import Flow
    from fovea.http.table import Entry

log = logging.getLogger("fovea.server")
SHORT_BODY = 64 * 1024
"""Bytes of a body that no route reads, but for which a connection stays open."""


class Owner(Protocol):
    """The connection of a request, which is also the transport that uvicorn's code writes to.

    server_state: the headers of every response.
    flow: its flow control.
    entry: what it does now.
    """

    server_state: ServerState
    flow: Flow
    entry: Entry

    @property
    def body_left(self) -> float:
        """Bytes of the body that have not arrived; infinite: unknown."""
        ...

    def refuse(self, refusal: Refusal) -> None:
        """Write an answer that no route gave, and close."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...

    def on_response_complete(self) -> None:
        """The answer is complete."""
        ...


class Cycle(RequestResponseCycle):
    """Receives the body of one request and sends its answer.

    Unlike uvicorn's, it ends the connection after an answer that did not wait for its body, and while the
    server drains. It never writes a traceback for a request that the server itself has cancelled.
    """

    def __init__(
        self, owner: Owner, scope: HTTPScope, *, expect_100_continue: bool, keep_alive: bool
    ) -> None:
        """owner: the connection, which also writes and closes.

        scope: the request in ASGI's form.
        expect_100_continue: whether the client waits for a sign before it sends the body.
        keep_alive: whether the client lets the connection stay open.
        """
        super().__init__(
            scope=scope,
            transport=cast(asyncio.Transport, owner),
            flow=owner.flow,
            logger=log,
            access_logger=log,
            access_log=False,
            default_headers=owner.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expect_100_continue,
            keep_alive=keep_alive,
            on_response=owner.on_response_complete,
        )
        self._owner = owner

    def send(self, message: ASGISendEvent) -> Coroutine[Any, Any, None]:
        if self.disconnected:
            # Let others run: an application that only sends would otherwise never learn that the client left.
            return asyncio.sleep(0)
        if not self.response_started and self.keep_alive and self._is_last():
            self.keep_alive = False
        return super().send(message)

    def _is_last(self) -> bool:
        """Tell whether the connection has to end after this answer."""
        if self._owner.entry.table.draining:
            return True
        unread = self.more_body and self._owner.body_left > SHORT_BODY
        return unread or (self.more_body and self.waiting_for_100_continue)

    async def run_asgi(self, app: ASGI3Application) -> None:
        """Run the application for this request. An answer that it leaves out becomes a 500, or a 503."""
        refusal = DEFECT
        try:
            await app(self.scope, cast(Any, self.receive), cast(Any, self.send))
            if not self.response_complete and not self.disconnected:
                log.error("%s %s got no complete answer", self.scope["method"], self.scope["path"][:200])
        except asyncio.CancelledError:
            refusal = SHUTTING_DOWN
        except BaseException as error:
            log.error("%s %s failed", self.scope["method"], self.scope["path"][:200], exc_info=error)
        self.finish(refusal)

    def finish(self, refusal: Refusal) -> None:
        """End a request whose application will send nothing more. A complete answer stays as it is."""
        self.on_response = lambda: None
        if self.disconnected or self.response_complete:
            return
        self.disconnected = True
        self.message_event.set()
        if self.response_started:
            self._owner.abort()
        else:
            self.response_started = True
            self._owner.refuse(refusal)
