"""A generation as server-sent events."""

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
from fovea.server.answer import deltas, while_connected
from fovea.server.room import Room
from fovea.server.state import ServerState

log = logging.getLogger("fovea.server")


class Bodies(Protocol):
    """How one kind of completion writes its chunks."""

    def chunks(self, delta: Delta) -> list[dict[str, Any]]: ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...


class _EventStream(StreamingResponse):
    """Ends the generation with the response, however that ends: a generator that was never begun, or is left
    in the middle, would otherwise live until it is collected as garbage.
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
    state: ServerState, http: Request, request: GenerationRequest, room: Room, bodies: Bodies, body: Sampling
) -> StreamingResponse:
    """Waits for the first delta, so that whatever is wrong with the request is still an HTTP status."""
    stream = deltas(state, request, room)
    first = await while_connected(http, anext(stream))
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    return _EventStream(_events(bodies, first, stream, include_usage), stream)


async def _events(
    bodies: Bodies, first: Delta, rest: AsyncGenerator[Delta, None], include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Status 200 is sent by now, so an error can only be an event; then the stream ends without [DONE]."""
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
