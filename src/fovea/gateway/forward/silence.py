"""Ends streams whose backend sends nothing more.

A timer for each piece of each stream would cost more than the piece. So a stream notes since when it waits
for its backend, and one task looks at all streams a few times a second. A client that reads slowly is not
the backend's fault: while the gateway waits for the client, the stream is not silent.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

TICK_S = 0.25


class Silence:
    """The silence of one stream.

    since: time since which it waits for its backend; infinite: it does not.
    """

    __slots__ = ("_deadline", "_idle_s", "_limit", "since")

    def __init__(self, idle_s: float, deadline: float, limit: asyncio.Timeout) -> None:
        self.since = math.inf
        self._idle_s = idle_s
        self._deadline = deadline
        self._limit = limit

    def check(self, now: float) -> None:
        """End the stream if it has been silent for too long, or if its time is over."""
        if now - self.since > self._idle_s or (now > self._deadline and self.since < math.inf):
            self._limit.reschedule(now)
            self.since = math.inf


class SilenceWatch:
    """Watches the streams of one worker.

    clock: the event loop's clock in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._streams: set[Silence] = set()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watch(self, idle_s: float, deadline: float) -> AsyncIterator[Silence]:
        """Watch a stream until the block ends. A stream that is ended raises TimeoutError from the block.

        idle_s: longest silence. deadline: time of the clock at which the stream is ended in any case.
        """
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        async with asyncio.timeout(None) as limit:
            silence = Silence(idle_s, deadline, limit)
            self._streams.add(silence)
            try:
                yield silence
            finally:
                self._streams.discard(silence)

    async def aclose(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            for stream in tuple(self._streams):
                stream.check(now)
