"""Running one generation for one HTTP client, and stopping it when the client disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from fastapi import Request

from fovea.core.answer import AnswerBuilder
from fovea.core.errors import DeadlineExceeded, FoveaError
from fovea.core.types import Completion, Delta, GenerationRequest
from fovea.http.refusals import ClientGone
from fovea.server.charge import Charge
from fovea.server.recorder import GenerationRecorder
from fovea.server.reservations import Reservation
from fovea.server.state import ServerState

T = TypeVar("T")


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work` and return its result. If the client disconnects, cancel it and raise ClientGone."""
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
    """The deadline of a request, counted from now. It covers loading the images and videos, and the engine.

    seconds: None: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline; 0 after it; None: no limit."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    async def limit_loading(self, work: Awaitable[T]) -> T:
        """Await `work`, which loads images and videos, and return its result.

        Raises DeadlineExceeded at the deadline.
        """
        return await self.limit(work, "its images and videos were loaded")

    async def limit(self, work: Awaitable[T], step: str) -> T:
        """Await `work` and return its result.

        step: completes "the timeout ran out while ...", for the error.
        Raises DeadlineExceeded at the deadline.
        """
        try:
            async with asyncio.timeout(self.remaining):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(f"the request's timeout ran out while {step}", param="timeout") from None


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


async def stream_deltas(
    state: ServerState, request: GenerationRequest, reservation: Reservation
) -> AsyncGenerator[Delta, None]:
    """Yield the engine's deltas, record their times in the metrics, and charge their tokens to the client.

    reservation: the places of the request, which are handed over to the engine.
    Raises InvalidRequest for a priority that the client may not use, Overloaded if it has too few tokens
    left.
    """
    caller, choices = reservation.caller, request.sampling.n
    caller.client.check_priority(request.priority)
    name = f"{caller.request_id}-{request.id}" if caller.request_id else request.id
    sent = replace(request, id=name, cache_share=caller.client.limits.cache_share, client=caller.party)
    stream = state.client.stream(sent)
    charge = Charge(caller, sent, check=not reservation.begun)
    reservation.hand_over(choices)
    recorder = GenerationRecorder(state, request, caller, charge.media)
    try:
        async for delta in stream:
            recorder.add(delta)
            charge.add(delta)
            yield delta
    except Exception as error:
        recorder.fail(error)
        charge.refuse(error)
        raise
    finally:
        recorder.end(charge.settle())
        reservation.end(choices)
        state.media.release(request.prompt)
        await stream.aclose()  # type: ignore[attr-defined]


async def collect_answer(
    state: ServerState, request: GenerationRequest, reservation: Reservation
) -> Completion:
    """Run a generation to its end and return the complete answer."""
    answer = AnswerBuilder(request.sampling.n)
    async for delta in stream_deltas(state, request, reservation):
        answer.add(delta)
    return answer.build()
