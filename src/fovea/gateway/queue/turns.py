"""The fair queue for tasks of an event loop: a task waits here until its request may run.

    turn = await turns.acquire("alice", weight=2, cost=1500, deadline_s=loop.time() + 30)
    try:
        ...
    finally:
        turns.release(turn)

The decisions are those of queue/fair.py. If there is room, `acquire` returns without suspending the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from fovea.core.errors import DeadlineExceeded, InvalidRequest
from fovea.gateway.queue.fair import FairQueue
from fovea.gateway.queue.settings import QueueSettings
from fovea.gateway.queue.turn import MOST_PRIORITY, State, Turn


class TurnQueue:
    """Tasks that wait for their turns, in one event loop.

    tokens, requests: the capacity at the beginning. 0: every request waits until `resize` gives more.
    clock: the event loop's clock in seconds, which deadlines refer to.
    """

    __slots__ = ("_queue", "_clock")

    def __init__(
        self, settings: QueueSettings, tokens: int, requests: int, clock: Callable[[], float]
    ) -> None:
        self._queue = FairQueue(settings, tokens, requests)
        self._clock = clock

    @property
    def queue(self) -> FairQueue:
        """The counts: waiting, running, and their tokens. For metrics."""
        return self._queue

    async def acquire(
        self,
        tenant: str,
        *,
        weight: float = 1.0,
        priority: int = 0,
        cost: int = 1,
        deadline_s: float | None = None,
    ) -> Turn:
        """Wait until the request may run. `release` must be called for the result, once.

        weight: the tenant's weight, greater than 0.
        cost: estimated tokens of text and images.
        deadline_s: the time of the clock at which waiting ends; None: never.

        Raises Overloaded if the queue is full, DeadlineExceeded if the deadline passes while it waits, and
        InvalidRequest for a priority that is not accepted; ValueError for a wrong weight. A task that is
        cancelled leaves the queue.
        """
        if not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
            raise InvalidRequest(
                f"priority is {priority}; accepted: -{MOST_PRIORITY} to {MOST_PRIORITY}", param="priority"
            )
        if not weight > 0:
            raise ValueError(f"weight is {weight}; accepted: numbers greater than 0")
        turn = Turn(tenant, weight, priority, cost)
        started, refusal = self._queue.offer(turn, self._clock())
        if refusal is not None or len(started) > 1 or turn.state is not State.RUNNING:
            _wake(started)
            if refusal is not None:
                raise refusal
            if turn.state is not State.RUNNING:
                await self._wait(turn, deadline_s)
        return turn

    def release(self, turn: Turn, used: int | None = None) -> None:
        """End a running request, and let the next ones run. A second call does nothing.

        used: tokens that the request used, if they are known. Otherwise its cost was right.
        """
        if turn.state is State.RUNNING:
            _wake(self._queue.finish(turn, self._clock(), used))

    @asynccontextmanager
    async def turn(
        self,
        tenant: str,
        *,
        weight: float = 1.0,
        priority: int = 0,
        cost: int = 1,
        deadline_s: float | None = None,
    ) -> AsyncIterator[Turn]:
        """Hold a turn for a block of code. The arguments and errors are those of `acquire`."""
        turn = await self.acquire(tenant, weight=weight, priority=priority, cost=cost, deadline_s=deadline_s)
        try:
            yield turn
        finally:
            self.release(turn)

    def resize(self, tokens: int, requests: int) -> None:
        """Change the capacity, as backends come and go. Running requests go on."""
        _wake(self._queue.resize(tokens, requests))

    async def _wait(self, turn: Turn, deadline_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        turn.waiter = loop.create_future()
        timer = None
        if deadline_s is not None:
            timer = loop.call_later(max(0.0, deadline_s - self._clock()), self._expire, turn)
        try:
            await turn.waiter
        except BaseException:
            # A cancelled task may have got its turn in the same moment; then it gives the turn back.
            self.release(turn)
            self._withdraw(turn)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _expire(self, turn: Turn) -> None:
        if turn.state is not State.WAITING or turn.waiter is None:
            return
        self._withdraw(turn)
        if not turn.waiter.done():
            turn.waiter.set_exception(
                DeadlineExceeded("the request's deadline passed while it waited for a backend with room")
            )

    def _withdraw(self, turn: Turn) -> None:
        if turn.state is State.WAITING:
            _wake(self._queue.withdraw(turn, self._clock()))


def _wake(turns: Iterable[Turn]) -> None:
    for turn in turns:
        if turn.waiter is not None and not turn.waiter.done():
            turn.waiter.set_result(None)
