"""The fair queue's decisions: which requests run now. Pure: the clock is passed in, and nothing waits here.

The aim is that a tenant that floods the gateway costs another tenant at most 20% of its p95. An order alone
(`Order`) cannot give that, because requests that run are not interrupted: a request that is first in the
order still waits until one of the running requests ends, or, if it has large images, until several have
ended. If the flood's requests are large, that wait is longer than a short request itself. So there are three
parts:

1. Order. The requests of a tenant that was idle go before those of tenants that wait already, up to a quantum
   of tokens per round. This removes the wait behind the flood's queue.
2. Headroom. A share of the capacity is kept free for the tenants of part 1 while others wait. This removes
   the wait for the running requests to end. After the headroom was used, the next requests that end fill it
   again, before the flood sends more. A request larger than the headroom must leave as much free as it takes
   (up to a quarter of the capacity), because the room that it takes comes back late and all at once. All this
   costs throughput only while it is of use: nothing is kept free if all recent tenants wait themselves (then
   the order is enough), or if there is only one tenant.
3. Reservation. If the first request in the order does not fit, nothing else goes, so room gathers for it.
   Small requests cannot pass a large one for ever.

A cap on each tenant's share of the running requests would be the other form. It wastes more: with a cap of
1/2, a flood beside a tenant that uses 5% leaves 45% of the capacity idle; the headroom leaves 12.5%.
benchmarks/gateway/fairness.py prints what each part brings.

Priorities are strict, except that less urgent classes earn `queue_class_share` of the tokens that more urgent
ones send, and spend them in turn. So the first request of a class, of c tokens, goes after at most
(classes - 1) * c / share tokens of more urgent requests, plus one request.

The order within one priority is deficit round robin (M. Shreedhar and G. Varghese, SIGCOMM 1995): tenants
that wait are visited in a ring. A visit adds a quantum of tokens, times the tenant's weight, to the tenant's
deficit, and the tenant sends requests while its deficit is above 0. Here a deficit may go below 0 by the cost
of the last request, which later visits pay back, so a request may be larger than the quantum and the next one
never needs to be inspected. Between two tenants that wait all the time, the tokens sent per unit of weight
differ by at most one quantum and one request of each. A request costs 1 + cost / (quantum * weight) visits,
however many tenants wait.

A tenant that was idle starts in a second ring, `fresh`, with one quantum; that ring is served first (as for
new flows in FQ-CoDel, RFC 8290). It gains no more than a quantum per round by that: when its quantum is
spent, or when it has nothing to send, it goes to the end of the other ring, and it counts as idle only when a
visit finds it there without requests and without debt.

A request that is larger than the capacity runs alone. At most one such request runs, with nothing beside it.
"""

from __future__ import annotations

import asyncio
import enum
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from typing import NamedTuple

from fovea.core.errors import Overloaded
from fovea.gateway.settings import QueueSettings

MOST_DEBT = 1000
"""Most quanta of a flow's debt. More is forgiven: one wrong number must not make the ring turn for long."""
MEMORY_S = 20.0
"""Seconds after which a measurement counts 1/e."""
SHORTEST_S, LONGEST_S = 1.0, 60.0
"""Bounds of an estimate. The capacity changes too often for more than a minute."""
LARGEST_KEPT = 4
"""The most that a large request must leave free is the capacity divided by this."""


class State(enum.Enum):
    """The part of its way through the queue that a request has reached."""

    NEW = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class QueueSlot:
    """A request's slot in the queue: the request waits, or runs.

    tenant: name of its tenant.
    weight: weight of the tenant, greater than 0. Tenants that wait get shares in proportion to their weights.
    priority: -1000 to 1000; the lowest goes first.
    cost: estimated tokens of text and images, at least 1.
    waiter: the future on which a task waits, if one does.
    """

    __slots__ = ("tenant", "weight", "priority", "cost", "state", "waiter")

    def __init__(self, tenant: str, weight: float, priority: int, cost: int) -> None:
        self.tenant = tenant
        self.weight = weight
        self.priority = priority
        self.cost = cost if cost > 0 else 1
        self.state = State.NEW
        self.waiter: asyncio.Future[None] | None = None


class Decision(NamedTuple):
    """The answer to a new request.

    started: requests that run from now on, in order. The new one is among them if there is room for it.
    refusal: the new request cannot wait, because the queue is full. It is not in the queue.
    """

    started: list[QueueSlot]
    refusal: Overloaded | None = None


class FairQueue:
    """The waiting and running requests of all tenants.

    tokens, requests: the capacity, which is what may run at once. 0: nothing may run.
    now_s arguments are seconds of any clock that never goes back.
    """

    def __init__(self, settings: QueueSettings, tokens: int, requests: int) -> None:
        self._settings = settings
        self._drain = Drain()
        self.running = self.running_tokens = self.waiting = self.waiting_tokens = 0
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the one seen longest ago comes first
        self._waiting_tenants = 0
        self._waiting_weight = 0.0
        self._orders: dict[int, Order] = {}
        self._classes: list[int] = []  # priorities that have waiting requests, ascending
        self._owed = 0.0  # tokens that the less urgent classes have earned
        self._last_owed = 0  # the class that spent them last
        self._set_capacity(tokens, requests)

    def offer(self, slot: QueueSlot, now_s: float) -> Decision:
        """Add a new request. It runs at once, waits, or is refused."""
        tenant = self._seen(slot.tenant, now_s)
        self._add(tenant, slot)
        started = self._start()
        if slot.state is State.RUNNING:
            return Decision(started)
        settings = self._settings
        mine = tenant.waiting > settings.queue_length_per_tenant
        if not mine and self.waiting <= settings.queue_length:
            return Decision(started)
        refusal = self._refusal(tenant, mine, now_s)
        self._remove(tenant, slot)
        return Decision(started + self._start(), refusal)

    def finish(self, slot: QueueSlot, now_s: float, used: int | None = None) -> list[QueueSlot]:
        """End a running request. Returns the requests that run from now on.

        used: tokens that it used, if they are known. Its tenant is charged for them, not for the estimate.
        """
        slot.state = State.ENDED
        tenant = self._seen(slot.tenant, now_s)
        tenant.running -= 1
        self.running -= 1
        self.running_tokens -= slot.cost
        self._drain.add(slot.cost, now_s)
        if used is not None and used != slot.cost:
            # The rest of a round is not taken back from a flow that was idle since: it starts again.
            flow = tenant.flows.get(slot.priority)
            if flow is not None and flow.ring is not None:
                self._orders[slot.priority].charge(flow, used - slot.cost)
        return self._start()

    def withdraw(self, slot: QueueSlot, now_s: float) -> list[QueueSlot]:
        """Remove a waiting request. Returns the requests that run from now on."""
        self._remove(self._seen(slot.tenant, now_s), slot)
        return self._start()

    def resize(self, tokens: int, requests: int) -> list[QueueSlot]:
        """Change the capacity; running requests go on. Returns the requests that run from now on."""
        self._set_capacity(tokens, requests)
        return self._start()

    @property
    def capacity(self) -> tuple[int, int]:
        """Tokens and requests that may run at once."""
        return self._tokens, self._requests

    @property
    def tenants(self) -> int:
        """Number of tenants in memory."""
        return len(self._tenants)

    def _set_capacity(self, tokens: int, requests: int) -> None:
        self._tokens, self._requests = tokens, requests
        share = self._settings.queue_headroom
        self._keeps = share > 0
        self._kept_tokens, self._kept_requests = int(tokens * share), int(requests * share)

    def _seen(self, name: str, now_s: float) -> _Tenant:
        """Return a tenant, and forget one that was not seen for `queue_recent_s`."""
        tenants = self._tenants
        tenant = tenants.get(name)
        if tenant is None:
            tenant = tenants[name] = _Tenant()
        else:
            tenants.move_to_end(name)
        tenant.seen_s = now_s
        # Two per call at most, so that a call takes the same time always, and old ones still go faster
        # than new ones come.
        for _ in range(2):
            oldest = next(iter(tenants))
            if tenants[oldest].seen_s >= now_s - self._settings.queue_recent_s:
                break
            self._forget(oldest, now_s)
        return tenant

    def _forget(self, name: str, now_s: float) -> None:
        """Forget a tenant, or count it as seen now if it has requests."""
        tenant = self._tenants[name]
        if tenant.running or tenant.waiting:
            tenant.seen_s = now_s
            self._tenants.move_to_end(name)
            return
        for priority, flow in tenant.flows.items():
            self._orders[priority].forget(flow)
        del self._tenants[name]

    def _add(self, tenant: _Tenant, slot: QueueSlot) -> None:
        priority = slot.priority
        order = self._orders.get(priority)
        if order is None:
            order = self._orders[priority] = Order(self._settings.queue_quantum)
        flow = tenant.flows.get(priority)
        if flow is None:
            flow = tenant.flows[priority] = Flow()
        if not order.waiting:
            insort(self._classes, priority)
        if not tenant.waiting:
            tenant.weight = slot.weight
            self._waiting_tenants += 1
            self._waiting_weight += slot.weight
        order.add(flow, slot)
        slot.state = State.WAITING
        tenant.waiting += 1
        tenant.waiting_tokens += slot.cost
        self.waiting += 1
        self.waiting_tokens += slot.cost

    def _remove(self, tenant: _Tenant, slot: QueueSlot) -> None:
        order = self._orders[slot.priority]
        order.remove(tenant.flows[slot.priority], slot)
        slot.state = State.ENDED
        self._left(tenant, slot, order)

    def _left(self, tenant: _Tenant, slot: QueueSlot, order: Order) -> None:
        """Count a request out of those that wait."""
        tenant.waiting -= 1
        tenant.waiting_tokens -= slot.cost
        self.waiting -= 1
        self.waiting_tokens -= slot.cost
        if not tenant.waiting:
            self._waiting_tenants -= 1
            # No rounding error gathers in the sum: it starts again whenever nothing waits.
            self._waiting_weight = self._waiting_weight - tenant.weight if self.waiting else 0.0
        if not order.waiting:
            del self._classes[bisect_left(self._classes, slot.priority)]

    def _start(self) -> list[QueueSlot]:
        """Start requests in order until the next one does not fit."""
        started: list[QueueSlot] = []
        while self.waiting:
            order = self._orders[self._class()]
            head = order.head()
            if not self._fits(head):
                break
            slot = head.slot
            self._charge_classes(slot)
            order.take(head)
            tenant = self._tenants[slot.tenant]
            self._left(tenant, slot, order)
            slot.state = State.RUNNING
            tenant.running += 1
            self.running += 1
            self.running_tokens += slot.cost
            started.append(slot)
        return started

    def _fits(self, head: Head) -> bool:
        if not self._requests or not self._tokens:
            return False
        if not self.running:
            return True
        tokens, requests = self.running_tokens + head.slot.cost, self.running + 1
        # Recent tenants that do not wait may come back at any time: room is kept free for them.
        if self._keeps and not head.fresh and len(self._tenants) > self._waiting_tenants:
            tokens += max(self._kept_tokens, min(head.slot.cost, self._tokens // LARGEST_KEPT))
            requests += self._kept_requests
        return tokens <= self._tokens and requests <= self._requests

    def _class(self) -> int:
        """Return the priority that sends next."""
        classes = self._classes
        if len(classes) > 1:
            other = self._next_owed()
            if self._owed >= self._orders[other].head().slot.cost:
                return other
        return classes[0]

    def _next_owed(self) -> int:
        """Return the class, other than the most urgent one, that spends the earned tokens next."""
        classes = self._classes
        place = bisect_right(classes, self._last_owed, lo=1)
        return classes[place] if place < len(classes) else classes[1]

    def _charge_classes(self, slot: QueueSlot) -> None:
        """Let the less urgent classes earn from a more urgent request, or pay for their own."""
        classes = self._classes
        if len(classes) == 1:
            self._owed = 0.0
        elif slot.priority == classes[0]:
            self._owed += slot.cost * self._settings.queue_class_share
        else:
            self._owed -= slot.cost
            self._last_owed = slot.priority

    def _refusal(self, tenant: _Tenant, mine: bool, now_s: float) -> Overloaded:
        """Build the error of a request that cannot wait.

        mine: whether the tenant's own bound is reached, not that of all tenants.
        """
        if mine:
            share = min(1.0, tenant.weight / self._waiting_weight)
            seconds = self._drain.seconds(int(tenant.waiting_tokens / share), now_s)
            bound, name = self._settings.queue_length_per_tenant, "queue_length_per_tenant"
            text = f"{bound} requests of this client wait already, which is the most ({name})"
        else:
            seconds = self._drain.seconds(self.waiting_tokens, now_s)
            text = f"{self._settings.queue_length} requests wait already, which is the most (queue_length)"
        return Overloaded(f"{text}; try again in {seconds:.0f} s", retry_after=seconds, code="queue_full")


class Flow:
    """The requests of one tenant and one priority.

    weight: weight of the tenant in the latest request.
    deficit: tokens that the flow may still send in this round; negative: its debt.
    fresh: the deficit is the quantum of a flow that was idle.
    slots: waiting requests, oldest first.
    ring: the ring in which the flow is; None: it is idle.
    """

    __slots__ = ("weight", "deficit", "fresh", "slots", "ring")

    def __init__(self) -> None:
        self.weight = 1.0
        self.deficit = 0.0
        self.fresh = False
        self.slots: OrderedDict[QueueSlot, None] = OrderedDict()
        self.ring: Ring | None = None


Ring = OrderedDict[Flow, None]


class Head(NamedTuple):
    """The request that is next.

    fresh: its tenant was idle, and has not yet sent a quantum since.
    """

    slot: QueueSlot
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

    def add(self, flow: Flow, slot: QueueSlot) -> None:
        """Add a request at the end of its flow."""
        flow.weight = slot.weight
        if flow.ring is None:
            flow.deficit, flow.fresh = self._quantum * flow.weight, True
            self._move(flow, self._fresh)
        elif flow.fresh and flow.deficit > 0 and flow.ring is not self._fresh:
            self._move(flow, self._fresh)
        flow.slots[slot] = None
        self.waiting += 1

    def remove(self, flow: Flow, slot: QueueSlot) -> None:
        """Remove a waiting request."""
        del flow.slots[slot]
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
            if flow.slots and flow.deficit > 0:
                return Head(next(iter(flow.slots)), flow, True)
            self._move(flow, ring)
        while True:
            flow = next(iter(ring))
            if not flow.slots and flow.deficit >= 0:
                self.forget(flow)
                continue
            if flow.slots and flow.deficit > 0:
                return Head(next(iter(flow.slots)), flow, False)
            flow.deficit += self._quantum * flow.weight
            flow.fresh = False
            if flow.deficit <= 0 or not flow.slots:
                ring.move_to_end(flow)

    def take(self, head: Head) -> None:
        """Send the next request, and charge its flow."""
        flow = head.flow
        del flow.slots[head.slot]
        self.waiting -= 1
        self.charge(flow, head.slot.cost)
        if flow.ring is self._fresh and not flow.slots:
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


class Drain:
    """Tokens that ended per second, as an average that forgets exponentially."""

    __slots__ = ("_first_s", "_last_s", "_sum")

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._last_s = 0.0
        self._sum = 0.0

    def add(self, tokens: int, now_s: float) -> None:
        """Count the tokens of a request that has ended."""
        if self._first_s is None:
            self._first_s = self._last_s = now_s
        self._sum = self._sum * math.exp((self._last_s - now_s) / MEMORY_S) + tokens
        self._last_s = now_s

    def rate(self, now_s: float) -> float:
        """Return the tokens per second; 0 if nothing has ended yet."""
        if self._first_s is None:
            return 0.0
        # A sum over a time t since the first request stands for MEMORY_S * (1 - exp(-t / MEMORY_S)) seconds.
        spanned = MEMORY_S * -math.expm1(-max(now_s - self._first_s, 1.0) / MEMORY_S)
        return self._sum * math.exp((self._last_s - now_s) / MEMORY_S) / spanned

    def seconds(self, tokens: int, now_s: float) -> float:
        """Estimate the seconds in which this many tokens end, within the bounds.

        The longest time if nothing has ended yet, or not for long.
        """
        rate = self.rate(now_s)
        return min(LONGEST_S, max(SHORTEST_S, tokens / rate)) if rate > 0 else LONGEST_S


class _Tenant:
    """The requests of one tenant."""

    __slots__ = ("seen_s", "running", "waiting", "waiting_tokens", "weight", "flows")

    def __init__(self) -> None:
        self.seen_s = 0.0
        self.running = 0
        self.waiting = 0
        self.waiting_tokens = 0
        self.weight = 1.0
        self.flows: dict[int, Flow] = {}
