"""The table of open connections: how many there are, what each does, and until when it may do it.

It holds no socket and reads no clock, so that its rules can be tested without either. The rules:

- There is room for `capacity` connections, and for `per_address` of one client address.
- If the table is full, one connection makes room. `EVICTED` has the order of phases: first those that have
  their answer, then those that have not finished their headers, and in the end those that do not read their
  last answer or have been silent for longest within a body. Requests that are complete stay. If nobody makes
  room, nobody is accepted until a connection ends.
- A connection is in the table until its descriptor is closed, so that the limits hold for descriptors, too.
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

TRIES = 64
"""Connections of a phase that are asked to make room. Those that stay are the last to be asked again."""


class Phase(IntEnum):
    """Phases of a connection.

    HANDSHAKE: TLS; no byte of HTTP has arrived.
    HEAD: it has sent a part of a request line or of headers, or nothing since it was accepted.
    BODY: it sends a body.
    ANSWER: its request is complete, and the answer is computed or sent.
    ANSWERED: it has its answer, but has not sent all of the body, which nobody wants.
    IDLE: it waits between two requests.
    CLOSING: the server has closed it: the rest of the answer leaves, or the client has to end its side.
    ENDED: it was closed at once; its descriptor ends in the next iteration of the event loop.
    """

    HANDSHAKE = 0
    HEAD = 1
    BODY = 2
    ANSWER = 3
    ANSWERED = 4
    IDLE = 5
    CLOSING = 6
    ENDED = 7


EVICTED = (
    (Phase.CLOSING, False),
    (Phase.ANSWERED, False),
    (Phase.IDLE, False),
    (Phase.HEAD, False),
    (Phase.HANDSHAKE, False),
    (Phase.CLOSING, True),
    (Phase.BODY, True),
)
"""Phases in the order in which their connections make room, and whether that cuts off an unread answer."""


class Owner(Protocol):
    """The code that reads and writes a connection."""

    def evict(self, *, cut: bool) -> bool:
        """Close the connection at once to make room for another; False: not now.

        It stays while bytes of a request are arriving, or wait until the server reads them.
        cut: whether a closed connection ends even if its client has not read all of the answer.
        """
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

    def set_phase(self, phase: Phase, deadline: float = math.inf) -> None:
        """Note what the connection does from now on, and until when."""
        self.deadline = deadline
        if phase is self.phase:
            return
        queues = self.table.queues
        if self in queues[self.phase]:  # a connection that has left the table is in no queue
            del queues[self.phase][self]
            queues[phase][self] = None
        self.phase = phase

    def progress(self) -> None:
        """Note that bytes have arrived, so that the connection is the last of its phase to make room."""
        self.table.queues[self.phase].move_to_end(self)


class Connections:
    """All open connections of a server.

    capacity: most open connections.
    per_address: most open connections of one client address; 0: no limit.
    exempt: addresses for which `per_address` does not hold.
    observer: counts refusals and timeouts; None: nobody does.

    draining: whether the server shuts down. Answers then end their connections.
    queues: the entries of each phase, in the order in which they are asked to make room, oldest first.
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
        self.queues: dict[Phase, OrderedDict[Entry, None]] = {phase: OrderedDict() for phase in Phase}
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
        self.queues[phase][entry] = None
        return entry

    def leave(self, entry: Entry) -> None:
        """Remove a connection. Removing it twice is not an error."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        self._addresses[entry.address] -= 1
        if not self._addresses[entry.address]:
            del self._addresses[entry.address]
        del self.queues[entry.phase][entry]
        self.on_room()

    def make_room(self) -> bool:
        """Close a connection if the table is full. Tell whether there is room now, or in a moment."""
        if not self.full or self.queues[Phase.ENDED]:
            return True
        for phase, cut in EVICTED:
            queue = self.queues[phase]
            for entry in tuple(islice(queue, TRIES)):
                if entry.owner.evict(cut=cut):
                    self.refused(f"evicted_{phase.name.lower()}")
                    return True
                queue.move_to_end(entry)
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
            "connections_idle": len(self.queues[Phase.IDLE]),
            "connections_capacity": self.capacity,
            "connections_accepted": self.accepted,
        }
