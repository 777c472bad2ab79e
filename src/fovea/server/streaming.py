"""Streaming of a generation as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fovea.api import sse
from fovea.core.errors import EngineError, FoveaError
from fovea.core.types import Delta, GenerationRequest, Usage
from fovea.server.answer import stream_deltas, while_connected
from fovea.server.reservations import Reservation
from fovea.server.state import ServerState

SILENCE_S = 10.0
"""Seconds without a first token after which a stream sends a comment, and again after as many."""
log = logging.getLogger("fovea.server")


class Bodies(Protocol):
    """Writer of the events of one kind of answer, such as ChatBodies.

    done: bytes that end a stream without an error.
    """

    done: bytes

    def chunks(self, delta: Delta) -> list[dict[str, Any]]: ...

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]: ...

    def failure(self, error: FoveaError) -> dict[str, Any]: ...

    def event(self, payload: Any, /) -> bytes: ...


class _EventStream(StreamingResponse):
    """A streaming response that ends the generation when the response ends, for whatever reason.

    Otherwise a generator that was never started, or not run to its end, would live until its garbage
    collection.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        first: asyncio.Future[Delta],
        source: AsyncGenerator[Delta, None],
    ) -> None:
        """first: the first delta of the source, which is awaited in a task of its own."""
        super().__init__(events, media_type=sse.MEDIA_TYPE, headers=sse.HEADERS)
        self._events, self._first, self._source = events, first, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await _cancel(self._first)
            await self._source.aclose()


async def stream_response(
    state: ServerState,
    http: Request,
    request: GenerationRequest,
    reservation: Reservation,
    bodies: Bodies,
    include_usage: bool,
) -> StreamingResponse:
    """Start a generation and return the response that streams it.

    It waits for the first delta, so that an error of the request still becomes an HTTP status, but not longer
    than SILENCE_S: clients and proxies take a longer silence for a dead connection.
    """
    stream = stream_deltas(state, request, reservation)
    first = asyncio.ensure_future(anext(stream))
    try:
        await while_connected(http, asyncio.wait({first}, timeout=SILENCE_S))
    except BaseException:
        await _cancel(first)
        await stream.aclose()
        raise
    if first.done():
        first.result()
    return _EventStream(_events(bodies, first, stream, include_usage), first, stream)


async def _cancel(waiting: asyncio.Future[Delta]) -> None:
    """Stop waiting for a delta. A generator cannot be closed while it computes one."""
    if not waiting.done():
        waiting.cancel()
        with suppress(asyncio.CancelledError, FoveaError, StopAsyncIteration):
            await waiting


async def _events(
    bodies: Bodies,
    first: asyncio.Future[Delta],
    rest: AsyncGenerator[Delta, None],
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream, and comments while there is no first delta.

    Status 200 is already sent, so an error becomes an event. The stream then ends without its mark of the
    end.
    """
    usage = Usage()
    try:
        while not first.done():
            await asyncio.wait({first}, timeout=SILENCE_S)
            if not first.done():
                yield sse.COMMENT
        delta: Delta | None = first.result()
        while delta is not None:
            for chunk in bodies.chunks(delta):
                yield bodies.event(chunk)
            usage = delta.usage or usage
            delta = await anext(rest, None)
        for chunk in bodies.closing(usage, include_usage):
            yield bodies.event(chunk)
        if bodies.done:
            yield bodies.done
    except FoveaError as error:
        yield bodies.event(bodies.failure(error))
    except Exception as error:  # the client must see that the stream broke
        log.error("a stream broke off", exc_info=error)
        yield bodies.event(bodies.failure(EngineError("the answer broke off; see the server's log")))
