"""When requests are sent.

Open loop: at given times, however the server fares; a request that leaves late is counted from when it was due, so a server
that stands still is charged with everyone who would have come meanwhile (no "coordinated omission"). Closed loop: a client
asks again when it has its answer, so a slow server is asked less.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
Ask_ = TypeVar("Ask_")
LEAD_S = 0.05
"""From the start of an open loop to its first moment: time to make the tasks."""
TICK_S = 0.02


async def open_loop(
    asks: Sequence[tuple[float, Ask_]],
    send: Callable[[Ask_, float], Awaitable[T]],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[T]:
    """asks: (seconds from the start, request), in order. `send` is told when the request was due."""
    start = clock() + LEAD_S
    tasks: list[asyncio.Task[T]] = []

    async def one(ask: Ask_, due: float) -> T:
        return await send(ask, due)

    async with asyncio.TaskGroup() as group:
        for at, ask in asks:
            while (wait := start + at - clock()) > 0:
                await sleep(wait)
            tasks.append(group.create_task(one(ask, start + at)))
            await sleep(0)  # a crowd that is due at once is sent one by one, not held back until all are made
    return [task.result() for task in tasks]


async def closed_loop(
    work: Iterable[Callable[[], Awaitable[T]]],
    clients: int,
) -> list[T]:
    """`clients` at a time, each taking the next piece of work when it has done one; results in the order of the work."""
    coming = enumerate(work)
    results: dict[int, T] = {}

    async def client() -> None:
        for number, piece in coming:
            results[number] = await piece()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return [results[number] for number in sorted(results)]


@dataclass(slots=True)
class Lag:
    """How late the load generator's own event loop was while requests ran: what it measured may be that much too long.
    Seconds."""

    seen: list[float] = field(default_factory=list)


@contextlib.asynccontextmanager
async def watching_lag(clock: Callable[[], float], busy: Callable[[], bool]) -> AsyncIterator[Lag]:
    """busy: whether a request runs. Making pictures holds the loop up, too, and there it harms nothing."""
    lag = Lag()

    async def tick() -> None:
        while True:
            before, ran = clock(), busy()
            await asyncio.sleep(TICK_S)
            if ran and busy():
                lag.seen.append(max(0.0, clock() - before - TICK_S))

    task = asyncio.create_task(tick())
    try:
        yield lag
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
