"""The fair queue for tasks of an event loop, and one such queue for each model.

    slot = await queues.of(model).acquire("alice", weight=2, cost=1500, deadline_s=loop.time() + 30)
    try:
        ...
    finally:
        queue.release(slot)

Requests wait here while the backends of their model are full. The decisions are those of `fair_queue`. If
there is room, `acquire` returns without suspending the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from fovea.core.errors import DeadlineExceeded
from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.config import ModelConfig
from fovea.gateway.fair_queue import FairQueue, QueueSlot, State
from fovea.gateway.settings import QueueSettings, RouteSettings

ENDLESS = 1 << 60
"""A capacity without a limit."""
LOW_AT = 1.0
"""Part of the capacity in use from which images are asked for at the lowest level."""


@dataclass(eq=False)
class Queues:
    """The queues of one worker. A worker's share of a backend is the same as that of every other worker.

    workers: processes that send to the same backends.
    """

    fleet: Fleet
    route: RouteSettings
    settings: QueueSettings
    workers: int
    clock: Callable[[], float]
    _queues: dict[str, SlotQueue] = field(default_factory=dict, init=False)

    def __iter__(self) -> Iterator[tuple[str, SlotQueue]]:
        return iter(self._queues.items())

    def of(self, model: ModelConfig) -> SlotQueue:
        """Return the queue of a model."""
        queue = self._queues.get(model.name)
        if queue is None:
            tokens, requests = self._capacity(model)
            queue = SlotQueue(self.settings, tokens, requests, self.clock)
            self._queues[model.name] = queue
        return queue

    def resize(self) -> None:
        """Fit all queues to the backends that there are now. Queues of models that are gone are dropped."""
        known = {model.name: model for model in self.fleet.models()}
        for name, queue in list(self._queues.items()):
            if name in known:
                queue.resize(*self._capacity(known[name]))
            elif not queue.queue.waiting and not queue.queue.running:
                del self._queues[name]

    def degrade(self, model: ModelConfig) -> str:
        """Return the detail level to which images are lowered under the load of a model; "": not lowered."""
        at = self.route.degrade_at
        queue = self.of(model).queue
        tokens, requests = queue.capacity
        used = max(queue.running_tokens / max(1, tokens), queue.running / max(1, requests))
        if not at or used < at:
            return ""
        return "low" if queue.waiting or used >= LOW_AT else "medium"

    def _capacity(self, model: ModelConfig) -> tuple[int, int]:
        """Tokens and requests that the backends of a model may have outstanding from this worker.

        Backends that accept nothing now count, too: a model without any backend must answer with their
        reasons at once, not after a wait.
        """
        tokens = requests = 0
        for backend in self.fleet.serving(model):
            tokens += backend.config.max_tokens or self.route.tokens_per_backend or ENDLESS
            requests += backend.config.max_requests or self.route.requests_per_backend or ENDLESS
        share = self.workers
        return min(ENDLESS, -(-tokens // share)) or ENDLESS, min(ENDLESS, -(-requests // share)) or ENDLESS


class SlotQueue:
    """Tasks that wait for queue slots, in one event loop.

    tokens, requests: the capacity at the beginning. 0: every request waits until `resize` gives more.
    clock: the event loop's clock in seconds, which deadlines refer to.
    queue: its counts (waiting, running, and their tokens) are metrics.
    """

    def __init__(
        self, settings: QueueSettings, tokens: int, requests: int, clock: Callable[[], float]
    ) -> None:
        self.queue = FairQueue(settings, tokens, requests)
        self._clock = clock

    async def acquire(
        self,
        tenant: str,
        *,
        weight: float = 1.0,
        priority: int = 0,
        cost: int = 1,
        deadline_s: float | None = None,
    ) -> QueueSlot:
        """Wait until the request may run. `release` must be called for the result, once.

        weight: the tenant's weight, greater than 0.
        cost: estimated tokens of text and images.
        deadline_s: the time of the clock at which waiting ends; None: never.

        Raises Overloaded if the queue is full, and DeadlineExceeded if the deadline passes while it waits. A
        task that is cancelled leaves the queue. Raises ValueError for a wrong weight.
        """
        if not weight > 0:  # the order would never come to this tenant
            raise ValueError(f"weight is {weight}; accepted: numbers greater than 0")
        slot = QueueSlot(tenant, weight, priority, cost)
        started, refusal = self.queue.offer(slot, self._clock())
        if refusal is not None or len(started) > 1 or slot.state is not State.RUNNING:
            _wake(started)
            if refusal is not None:
                raise refusal
            if slot.state is not State.RUNNING:
                await self._wait(slot, deadline_s)
        return slot

    def release(self, slot: QueueSlot, used: int | None = None) -> None:
        """End a running request, and let the next ones run. A second call does nothing.

        used: tokens that the request used, if they are known. Otherwise its cost was right.
        """
        if slot.state is State.RUNNING:
            _wake(self.queue.finish(slot, self._clock(), used))

    def resize(self, tokens: int, requests: int) -> None:
        """Change the capacity, as backends come and go. Running requests go on."""
        _wake(self.queue.resize(tokens, requests))

    async def _wait(self, slot: QueueSlot, deadline_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        slot.waiter = loop.create_future()
        timer = None
        if deadline_s is not None:
            timer = loop.call_later(max(0.0, deadline_s - self._clock()), self._expire, slot)
        try:
            await slot.waiter
        except BaseException:
            # A cancelled task may have got its slot in the same moment; then it gives the slot back.
            self.release(slot)
            self._withdraw(slot)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _expire(self, slot: QueueSlot) -> None:
        if slot.state is not State.WAITING or slot.waiter is None:
            return
        self._withdraw(slot)
        if not slot.waiter.done():
            slot.waiter.set_exception(
                DeadlineExceeded("the request's deadline passed while it waited for a backend with room")
            )

    def _withdraw(self, slot: QueueSlot) -> None:
        if slot.state is State.WAITING:
            _wake(self.queue.withdraw(slot, self._clock()))


def _wake(slots: Iterable[QueueSlot]) -> None:
    for slot in slots:
        if slot.waiter is not None and not slot.waiter.done():
            slot.waiter.set_result(None)
