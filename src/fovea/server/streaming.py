"""Streaming of a generation as server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fovea.api import sse
from fovea.api.responses import error_body
from fovea.api.schema import Sampling
from fovea.core.errors import EngineError, FoveaError
from fovea.core.types import Delta, GenerationRequest, Usage
from fovea.server.answer import stream_deltas, while_connected
from fovea.server.reservations import Reservation
from fovea.server.state import ServerState

log = logging.getLogger("fovea.server")


class Bodies(Protocol):
    """Writer of the chunks of one kind of completion: ChatBodies or CompletionBodies."""

    def chunks(self, delta: Delta) -> list[dict[str, Any]]: ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...


class _EventStream(StreamingResponse):
    """A streaming response that ends the generation when the response ends, for whatever reason.

    Otherwise a generator that was never started, or not run to its end, would live until its garbage
    collection.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Delta, None]) -> None:
        super().__init__(events, media_type=sse.MEDIA_TYPE, headers=sse.HEADERS)
        self._generators = (events, source)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generator in self._generators:
                await generator.aclose()


async def stream_response(
    state: ServerState,
    http: Request,
    request: GenerationRequest,
    reservation: Reservation,
    bodies: Bodies,
    body: Sampling,
) -> StreamingResponse:
    """Start a generation and return the response that streams it.

    It waits for the first delta, so that an error of the request still becomes an HTTP status.
    """
    stream = stream_deltas(state, request, reservation)
    first = await while_connected(http, anext(stream))
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    return _EventStream(_events(bodies, first, stream, include_usage), stream)


async def _events(
    bodies: Bodies, first: Delta, rest: AsyncGenerator[Delta, None], include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream.

    Status 200 is already sent, so an error becomes an event. The stream then ends without [DONE].
    """
    usage = Usage()
    delta: Delta | None = first
    try:
        while delta is not None:
            for chunk in bodies.chunks(delta):
                yield sse.event(chunk)
            usage = delta.usage or usage
            delta = await anext(rest, None)
        if include_usage:
            yield sse.event(bodies.usage_chunk(usage))
        yield sse.DONE
    except FoveaError as error:
        yield sse.event(error_body(error))
    except Exception as error:  # the client must see that the stream broke
        log.error("a stream broke off", exc_info=error)
        yield sse.event(error_body(EngineError("the answer broke off; see the server's log")))
