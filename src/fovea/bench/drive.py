"""Open loop and closed loop: two ways to decide when a request is sent.

Open loop: requests are sent at given times, however slow the server is. A request that is sent late is timed
from when it was due. A server that stalls is therefore charged for all requests that were due meanwhile (no
"coordinated omission"). Closed loop: a client sends its next request when it has its answer, so a slow server
gets fewer requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
Request = TypeVar("Request")
LEAD_S = 0.05
"""Seconds from the start of an open loop to its time 0, so that the first tasks can be created before they
are due.
"""
TICK_S = 0.02
"""Seconds between two measurements of the event loop's lag and processor time."""


async def open_loop(
    requests: Sequence[tuple[float, Request]],
    send: Callable[[Request, float], Awaitable[T]],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[T]:
    """Send every request at its time and return the results in the order of the requests.

    requests: (seconds from the start, request), ordered by time.
    send: called with a request and the time on `clock` at which it was due.
    """
    start = clock() + LEAD_S
    tasks: list[asyncio.Task[T]] = []

    async def send_one(request: Request, due: float) -> T:
        return await send(request, due)

    async with asyncio.TaskGroup() as group:
        for at, request in requests:
            while (wait := start + at - clock()) > 0:
                await sleep(wait)
            tasks.append(group.create_task(send_one(request, start + at)))
            # Let the new task run now. Otherwise requests due at one moment are sent only after all tasks
            # exist.
            await sleep(0)
    return [task.result() for task in tasks]


async def closed_loop(
    calls: Iterable[Callable[[], Awaitable[T]]],
    clients: int,
) -> list[T]:
    """Run all calls, `clients` at a time, and return the results in the order of the calls.

    Each client takes the next call when its previous one has returned.
    """
    queue = enumerate(calls)
    results: dict[int, T] = {}

    async def client() -> None:
        for number, call in queue:
            results[number] = await call()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return [results[number] for number in sorted(results)]


@dataclass(slots=True)
class Lag:
    """Delays of the load generator's own event loop, and its processor time, while requests ran.

    Measured times may be too long by as much as the delays.

    delays: one value per tick, in seconds.
    seconds, cpu_s: time that passed, and processor time of this process, in all these ticks.
    """

    delays: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def core_share(self) -> float:
        """Share of one core that the load generator used while requests ran; nan without any tick."""
        return self.cpu_s / self.seconds if self.seconds else math.nan


@contextlib.asynccontextmanager
async def measure_lag(
    clock: Callable[[], float],
    busy: Callable[[], bool],
    cpu: Callable[[], float] = time.process_time,
) -> AsyncIterator[Lag]:
    """Measure the event loop's lag and processor time every TICK_S seconds until the block ends.

    busy: whether a request is running. Other times do not count: generating pictures also blocks the loop,
        but falsifies no measurement.
    cpu: processor time of this process, in seconds.
    """
    lag = Lag()

    async def tick() -> None:
        while True:
            before, cpu_before, was_busy = clock(), cpu(), busy()
            await asyncio.sleep(TICK_S)
            if was_busy and busy():
                seconds = clock() - before
                lag.delays.append(max(0.0, seconds - TICK_S))
                lag.seconds += seconds
                lag.cpu_s += cpu() - cpu_before

    task = asyncio.create_task(tick())
    try:
        yield lag
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
