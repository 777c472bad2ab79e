"""The table of open connections: how many there are, what each does, and until when it may do it.

It holds no socket and reads no clock, so that its rules can be tested without either. The rules:

- There is room for `capacity` connections, and for `per_address` of one client address.
- If the table is full, the connection that has been idle for longest makes room; without an idle one, the
  oldest that has not finished its headers. Without either, nobody is accepted until a connection ends.
- A connection has a deadline for what it does now (`deadline`) and another for its unread answer
  (`write_deadline`). `sweep` tells the owners of all connections that are over one of them.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from itertools import islice
from typing import Protocol

TRIES = 8
"""Connections of a phase that are asked to make room for another."""


class Phase(IntEnum):
    """Phases of a connection.

    HANDSHAKE: TLS; no byte of HTTP has arrived.
    HEAD: it has sent a part of a request line or of headers, or nothing since it was accepted.
    BODY: it sends a body.
    ANSWER: its request is complete, and the answer is computed or sent.
    IDLE: it waits between two requests.
    CLOSING: the server has closed it, and the rest of the answer leaves.
    """

    HANDSHAKE = 0
    HEAD = 1
    BODY = 2
    ANSWER = 3
    IDLE = 4
    CLOSING = 5


class Owner(Protocol):
    """The code that reads and writes a connection."""

    def evict(self) -> bool:
        """Close the connection to make room for another; False: not now, because a request is arriving."""
        ...

    def expire(self, now: float) -> None:
        """A deadline of the connection is over: close it, or set a later deadline."""
        ...

    def tend(self, now: float) -> None:
        """Look after a connection whose socket is not being read."""
        ...

    def cut(self) -> None:
        """Answer a request whose body is still arriving with an error, because the server ends."""
        ...

    def shutdown(self) -> None:
        """Close the connection now, or after the answer that is being given."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class Observer(Protocol):
    """Counts what happens to connections."""

    def count_refused_connection(self, reason: str) -> None: ...

    def count_connection_timeout(self, kind: str) -> None: ...


class Entry:
    """One open connection.

    address: name under which the connections of its client are counted.
    phase: what it does.
    deadline, write_deadline: times of the table's clock; infinite: none.
    unread: whether the server has stopped reading its socket for now.
    owner: the code that reads and writes it.
    """

    __slots__ = ("address", "deadline", "owner", "phase", "table", "unread", "write_deadline")

    def __init__(self, table: Connections, address: str, owner: Owner, phase: Phase, deadline: float) -> None:
        self.table = table
        self.address = address
        self.owner = owner
        self.phase = phase
        self.deadline = deadline
        self.write_deadline = math.inf
        self.unread = False

    def turn(self, phase: Phase, deadline: float = math.inf) -> None:
        """Note what the connection does from now on, and until when."""
        self.deadline = deadline
        if phase is self.phase:
            return
        waiting = self.table.waiting
        if self.phase in waiting:
            waiting[self.phase].pop(self, None)
        self.phase = phase
        if phase in waiting:
            waiting[phase][self] = None


class Connections:
    """All open connections of a server.

    capacity: most open connections.
    per_address: most open connections of one client address; 0: no limit.
    exempt: addresses for which `per_address` does not hold.
    observer: counts refusals and timeouts; None: nobody does.

    draining: whether the server shuts down. Answers then end their connections.
    waiting: the entries of each phase in which a connection can be closed for another, oldest first.
    """

    def __init__(
        self,
        capacity: int,
        per_address: int = 0,
        *,
        exempt: Callable[[str], bool] = lambda address: False,
        observer: Observer | None = None,
    ) -> None:
        self.capacity = capacity
        self.per_address = per_address
        self.draining = False
        self.accepted = 0
        self.waiting: dict[Phase, OrderedDict[Entry, None]] = {
            Phase.IDLE: OrderedDict(),
            Phase.HEAD: OrderedDict(),
            Phase.HANDSHAKE: OrderedDict(),
        }
        self.on_room: Callable[[], None] = lambda: None
        self._exempt = exempt
        self._observer = observer
        self._entries: dict[Entry, None] = {}
        self._addresses: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries))

    @property
    def full(self) -> bool:
        """Whether a connection has to end before another one can be accepted."""
        return len(self._entries) >= self.capacity

    def accepts(self, address: str) -> bool:
        """Tell whether an address may open one more connection."""
        few = not self.per_address or self._addresses[address] < self.per_address
        return few or self._exempt(address)

    def enter(self, address: str, owner: Owner, phase: Phase, deadline: float) -> Entry:
        """Add a connection."""
        entry = Entry(self, address, owner, phase, deadline)
        self._entries[entry] = None
        self._addresses[address] += 1
        self.accepted += 1
        if phase in self.waiting:
            self.waiting[phase][entry] = None
        return entry

    def leave(self, entry: Entry) -> None:
        """Remove a connection. Removing it twice is no error."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        self._addresses[entry.address] -= 1
        if not self._addresses[entry.address]:
            del self._addresses[entry.address]
        if entry.phase in self.waiting:
            self.waiting[entry.phase].pop(entry, None)
        self.on_room()

    def make_room(self) -> bool:
        """Tell whether one more connection can be accepted; if the table is full, close one that waits."""
        if not self.full:
            return True
        for phase, entries in self.waiting.items():
            for entry in tuple(islice(entries, TRIES)):
                if entry.owner.evict():
                    self.refused(f"evicted_{phase.name.lower()}")
                    self.leave(entry)
                    return True
        return False

    def sweep(self, now: float) -> None:
        """Tell the owners of connections whose deadline is over, and of those that are not being read."""
        for entry in self:
            if entry.deadline <= now or entry.write_deadline <= now:
                entry.owner.expire(now)
            elif entry.unread:
                entry.owner.tend(now)

    def refused(self, reason: str) -> None:
        """Count a connection or request that was refused before any route saw it."""
        if self._observer is not None:
            self._observer.count_refused_connection(reason)

    def timed_out(self, kind: str) -> None:
        """Count a connection that ended because its client was too slow."""
        if self._observer is not None:
            self._observer.count_connection_timeout(kind)

    def stats(self) -> Mapping[str, float]:
        """Figures by the names of `observe.table`."""
        return {
            "connections_open": len(self._entries),
            "connections_idle": len(self.waiting[Phase.IDLE]),
            "connections_capacity": self.capacity,
            "connections_accepted": self.accepted,
        }
