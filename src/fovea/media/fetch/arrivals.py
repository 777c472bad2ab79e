"""Bytes of downloads that are arriving, under one ceiling for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fovea.core.errors import Overloaded


class Arrival:
    """One download that is arriving. size: its bytes so far."""

    def __init__(self, arrivals: Arrivals, stop: asyncio.Timeout) -> None:
        self.size = 0
        self.refused = False
        self._arrivals = arrivals
        self._stop = stop

    def add(self, size: int) -> None:
        """Claim room for further bytes. Raises Overloaded if this download has to make room for others."""
        self._arrivals.claim(self, size)

    def refuse(self) -> None:
        """Stop the download, wherever it waits."""
        self.refused = True
        self._stop.reschedule(asyncio.get_running_loop().time())


class Arrivals:
    """Counts the bytes of unfinished downloads. If there is no more room, the largest of them is refused.

    So many large videos at a time do not stop a small image. A download that has ended is counted no more:
    its caller counts the bytes that it keeps. Use it within one event loop.

    capacity: ceiling in bytes. held: bytes that are counted now.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self._open: set[Arrival] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Arrival]:
        """Yield a new download. Raises Overloaded from within the block if the download is refused."""
        try:
            async with asyncio.timeout(None) as stop:
                arrival = Arrival(self, stop)
                self._open.add(arrival)
                try:
                    yield arrival
                finally:
                    self._close(arrival)
        except TimeoutError:
            if not arrival.refused:
                raise
            raise self._error(arrival) from None

    def claim(self, arrival: Arrival, size: int) -> None:
        """Count `size` further bytes of a download. Raises Overloaded if it is the one that is refused."""
        if not arrival.refused:
            arrival.size += size
            self.held += size
        while self.held > self.capacity:
            largest = max(self._open, key=lambda other: other.size)
            # Its memory is free when its task runs next, which is before any further bytes are read.
            self._close(largest)
            largest.refuse()
        if arrival.refused:
            raise self._error(arrival)

    def _close(self, arrival: Arrival) -> None:
        if arrival in self._open:
            self._open.remove(arrival)
            self.held -= arrival.size

    def _error(self, arrival: Arrival) -> Overloaded:
        return Overloaded(
            f"the download was stopped after {arrival.size} bytes, as the largest one, because all downloads "
            f"together have more than {self.capacity} bytes; try again",
            retry_after=1.0,
            code="media_full",
            scope="request",
        )
