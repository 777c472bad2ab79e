"""The order of the requests of one priority: deficit round robin over tenants, tenants that were idle first.

Deficit round robin (M. Shreedhar and G. Varghese, SIGCOMM 1995) visits the tenants that wait in a ring. A
visit adds a quantum of tokens, times the tenant's weight, to the tenant's deficit, and the tenant sends
requests while its deficit is above 0. Here a deficit may go below 0 by the cost of the last request, which
later visits pay back, so a request may be larger than the quantum and the next one never needs to be
inspected. Between two tenants that wait all the time, the tokens sent per unit of weight differ by at most
one quantum and one request of each. A request costs 1 + cost / (quantum * weight) visits, however many
tenants wait.

A tenant that was idle starts in a second ring, `fresh`, with one quantum; that ring is served first (as for
new flows in FQ-CoDel, RFC 8290). It gains no more than a quantum per round by that: when its quantum is
spent, or when it has nothing to send, it goes to the end of the other ring, and it counts as idle only when
a visit finds it there without requests and without debt.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from fovea.gateway.queue.turn import Turn

MOST_DEBT = 1000
"""Most quanta of a flow's debt. More is forgiven: one wrong number must not make the ring turn for long."""


class Flow:
    """The requests of one tenant and one priority.

    weight: weight of the tenant in the latest request.
    deficit: tokens that the flow may still send in this round; negative: its debt.
    fresh: the deficit is the quantum of a flow that was idle.
    turns: waiting requests, oldest first.
    ring: the ring in which the flow is; None: it is idle.
    """

    __slots__ = ("weight", "deficit", "fresh", "turns", "ring")

    def __init__(self) -> None:
        self.weight = 1.0
        self.deficit = 0.0
        self.fresh = False
        self.turns: OrderedDict[Turn, None] = OrderedDict()
        self.ring: Ring | None = None


Ring = OrderedDict[Flow, None]


class Head(NamedTuple):
    """The request that is next.

    fresh: its tenant was idle, and has not yet sent a quantum since.
    """

    turn: Turn
    flow: Flow
    fresh: bool


class Order:
    """The waiting requests of one priority, and the order in which they go.

    quantum: tokens that a visit adds, times the weight.
    """

    __slots__ = ("_quantum", "_fresh", "_ring", "waiting")

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._fresh: Ring = OrderedDict()
        self._ring: Ring = OrderedDict()
        self.waiting = 0

    def add(self, flow: Flow, turn: Turn) -> None:
        """Add a request at the end of its flow."""
        flow.weight = turn.weight
        if flow.ring is None:
            flow.deficit, flow.fresh = self._quantum * flow.weight, True
            self._move(flow, self._fresh)
        elif flow.fresh and flow.deficit > 0 and flow.ring is not self._fresh:
            self._move(flow, self._fresh)
        flow.turns[turn] = None
        self.waiting += 1

    def remove(self, flow: Flow, turn: Turn) -> None:
        """Remove a waiting request."""
        del flow.turns[turn]
        self.waiting -= 1

    def forget(self, flow: Flow) -> None:
        """Remove a flow that has no requests."""
        if flow.ring is not None:
            del flow.ring[flow]
            flow.ring = None

    def head(self) -> Head:
        """Return the next request. There must be one. The answer stays the same until something changes."""
        fresh, ring = self._fresh, self._ring
        while fresh:
            flow = next(iter(fresh))
            if flow.turns and flow.deficit > 0:
                return Head(next(iter(flow.turns)), flow, True)
            self._move(flow, ring)
        while True:
            flow = next(iter(ring))
            if not flow.turns and flow.deficit >= 0:
                self.forget(flow)
                continue
            if flow.turns and flow.deficit > 0:
                return Head(next(iter(flow.turns)), flow, False)
            flow.deficit += self._quantum * flow.weight
            flow.fresh = False
            if flow.deficit <= 0 or not flow.turns:
                ring.move_to_end(flow)

    def take(self, head: Head) -> None:
        """Send the next request, and charge its flow."""
        flow = head.flow
        del flow.turns[head.turn]
        self.waiting -= 1
        self.charge(flow, head.turn.cost)
        if flow.ring is self._fresh and not flow.turns:
            self._move(flow, self._ring)

    def charge(self, flow: Flow, tokens: int) -> None:
        """Charge a flow, or give tokens back if there are fewer than 0.

        A flow that has spent its deficit goes to the end of the ring.
        """
        had = flow.deficit > 0
        quantum = self._quantum * flow.weight
        most = flow.deficit if flow.deficit > quantum else quantum  # tokens given back are not hoarded
        flow.deficit = max(min(flow.deficit - tokens, most), -MOST_DEBT * quantum)
        if had and flow.deficit <= 0:
            self._move(flow, self._ring)

    def _move(self, flow: Flow, ring: Ring) -> None:
        """Move a flow to the end of a ring."""
        if flow.ring is not None:
            del flow.ring[flow]
        ring[flow] = None
        flow.ring = ring
