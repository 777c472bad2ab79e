"""Run one generation for one HTTP client: nothing goes on for a client that has gone away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from typing import TypeVar

from fastapi import Request

from fovea.core.answer import AnswerBuilder
from fovea.core.errors import DeadlineExceeded, FoveaError
from fovea.core.types import Completion, Delta, GenerationRequest
from fovea.server.room import Room
from fovea.server.state import ServerState

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection. Nobody reads what is answered now."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for pending in (task, watcher):
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError, FoveaError):
                    await pending


class Deadline:
    """A request's own time, from now on: what its images take, the engine does not get. seconds: None is no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds, 0 when it has passed."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    async def reading(self, work: Awaitable[T]) -> T:
        """The result of `work`, which reads images. Raises DeadlineExceeded when the time runs out before."""
        try:
            async with asyncio.timeout(self.left):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(
                "the request's timeout ran out while its images were read", param="timeout"
            ) from None


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


async def deltas(state: ServerState, request: GenerationRequest, room: Room) -> AsyncGenerator[Delta, None]:
    """The engine's deltas, measured as they pass. room: what the request held until now."""
    last: dict[int, float] = {}
    media_s = request.fetch_s + request.media_decode_s
    started = time.perf_counter()
    ended = False
    room.hand_over(request.sampling.n)
    stream = state.client.stream(request)
    try:
        async for delta in stream:
            now = time.perf_counter()
            if not last:
                state.metrics.observe_first_token(media_s + now - started)
            ended = delta.usage is not None
            if delta.index in last and delta.token_ids:
                state.metrics.observe_gap(now - last[delta.index])
            last[delta.index] = now
            state.metrics.observe_delta(delta)
            yield delta
    finally:
        if not ended:
            state.metrics.count_failure()
        await stream.aclose()  # type: ignore[attr-defined]


async def whole(state: ServerState, request: GenerationRequest, room: Room) -> Completion:
    """All deltas as one answer."""
    answer = AnswerBuilder(request.sampling.n)
    async for delta in deltas(state, request, room):
        answer.add(delta)
    return answer.build()
