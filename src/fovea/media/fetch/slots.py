"""Slots for simultaneous work, shared fairly among sites."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """Grants at most `total` slots at a time, at most `per_site` of them to one site.

    A free slot goes to the waiting site that has the fewest, and within a site to whoever waits longest. So a
    site whose work takes long delays itself more than others. Use it within one event loop.
    """

    def __init__(self, total: int, per_site: int) -> None:
        self.free = total
        self._per_site = per_site
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def hold(self, site: str) -> AsyncIterator[None]:
        """Wait for a slot and keep it until the end of the `async with` block."""
        await self.acquire(site)
        try:
            yield
        finally:
            self.release(site)

    async def acquire(self, site: str) -> None:
        """Wait for a slot. Each call needs a `release` later."""
        # While a slot is free, nobody waits for it: `release` has granted whatever may be granted.
        if self.free and self._taken[site] < self._per_site:
            self._take(site)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(site, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(site, turn)
            else:  # it was granted in the same moment
                self.release(site)
            raise

    def release(self, site: str) -> None:
        """Give a slot back, and grant it to the next one who waits."""
        self._taken[site] -= 1
        if not self._taken[site]:
            del self._taken[site]
        self.free += 1
        while self.free and (next_site := self._next_site()) is not None:
            # Each site goes to the end after its turn, so that sites with equally many slots alternate.
            queue = self._waiting.pop(next_site)
            turn = queue.popleft()
            if queue:
                self._waiting[next_site] = queue
            if not turn.done():  # it is done if its task is being cancelled
                self._take(next_site)
                turn.set_result(None)

    def _take(self, site: str) -> None:
        self._taken[site] += 1
        self.free -= 1

    def _leave(self, site: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(site)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[site]

    def _next_site(self) -> str | None:
        waiting = (site for site in self._waiting if self._taken[site] < self._per_site)
        return min(waiting, key=self._taken.__getitem__, default=None)
