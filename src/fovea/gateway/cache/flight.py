"""Requests for the same answer at the same time: one goes to a backend, and the others wait for its answer.

The first request for a key leads. Later ones wait until the leader

    lands      with a stored answer: all of them get it
    leaves     without one, because its backend failed or its client is gone: the first that waits leads now
    scatters   because its answer cannot be stored: all of them go to a backend by themselves

Nobody waits longer than its own deadline, and a request that waits and is cancelled is forgotten.

Those that wait get the whole answer, also as a stream, and not the leader's bytes as they arrive. A request
that has sent half of an answer could not continue with the answer of another leader.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Literal

from fovea.gateway.cache.answers import Entry

_Verdict = Entry | Literal["lead", "alone"]


class _Group:
    """The requests that wait for one leader, in the order of their arrival."""

    __slots__ = ("leader", "waiting")

    def __init__(self, leader: Seat) -> None:
        self.leader = leader
        self.waiting: deque[tuple[Seat, asyncio.Future[_Verdict]]] = deque()


class Seat:
    """The place of one request among those for the same answer.

    leads: whether this request asks a backend for all of them. It then has to call `land`, `leave` or
        `scatter`; each does nothing if the seat does not lead.
    """

    __slots__ = ("_flights", "_group", "key", "leads")

    def __init__(self, flights: Flights, key: str) -> None:
        self.key = key
        self.leads = False
        self._flights = flights
        self._group: _Group | None = None

    async def wait(self, deadline_s: float) -> Entry | None:
        """Wait for the leader's answer, for at most so many seconds.

        None: this request goes to a backend, as the leader of the others if `leads` is true then.
        """
        group = self._group
        if group is None or not group.leader.leads or self.leads:
            return None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Verdict] = loop.create_future()
        item = (self, future)
        group.waiting.append(item)
        timer = loop.call_later(deadline_s, _decide, future, "alone")
        try:
            verdict = await future
        except asyncio.CancelledError:
            self.leave()
            raise
        finally:
            timer.cancel()
            if item in group.waiting:
                group.waiting.remove(item)
        return verdict if isinstance(verdict, Entry) else None

    def land(self, entry: Entry) -> None:
        """Give the answer to all that wait."""
        self._end(entry)

    def scatter(self) -> None:
        """Send all that wait to a backend by themselves."""
        self._end("alone")

    def leave(self) -> None:
        """Let the first that waits lead the others."""
        group = self._group
        if not self.leads or group is None:
            return
        self.leads, self._group = False, None
        while group.waiting:
            seat, future = group.waiting.popleft()
            if not future.done():
                seat.leads, group.leader = True, seat
                future.set_result("lead")
                return
        self._flights.forget(self.key)

    def _end(self, verdict: _Verdict) -> None:
        group = self._group
        if not self.leads or group is None:
            return
        self.leads, self._group = False, None
        self._flights.forget(self.key)
        for _, future in group.waiting:
            _decide(future, verdict)
        group.waiting.clear()


class Flights:
    """The groups of equal requests of one worker. For one event loop."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        """Number of keys for which a request leads."""
        return len(self._groups)

    def join(self, key: str) -> Seat:
        """Return a seat for a request. It leads if there is no other request for the key."""
        seat = Seat(self, key)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(seat)
            seat.leads = True
        seat._group = group
        return seat

    def forget(self, key: str) -> None:
        """Remove a key whose leader has ended. For seats only."""
        del self._groups[key]


def _decide(future: asyncio.Future[_Verdict], verdict: _Verdict) -> None:
    if not future.done():
        future.set_result(verdict)
