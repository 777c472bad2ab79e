"""Work that several ask for at once is done once, and goes on for as long as anybody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class SingleFlight(Generic[K, T]):
    """Within one event loop. Nothing is remembered: a result, or an error, reaches those who wait and nobody after."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[T]] = {}

    def __contains__(self, name: K) -> bool:
        """Whether that work is being done now."""
        return name in self._flights

    async def run(self, name: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the work of that name, begun by `work` unless it is being done.

        Who is cancelled leaves the others waiting; when the last one leaves, the work is cancelled.
        """
        flight = self._flights.get(name)
        if flight is None:
            flight = self._flights[name] = _Flight(asyncio.create_task(work()))
            flight.task.add_done_callback(lambda task: self._ended(name, task))
        flight.waiting += 1
        try:
            await asyncio.wait(
                (flight.task,)
            )  # unlike awaiting the task, this does not cancel it with the waiter
            return flight.task.result()
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._forget(
                    name, flight.task
                )  # at once: whoever asks next must not join what is about to end
                flight.task.cancel()

    def _ended(self, name: K, task: asyncio.Task[T]) -> None:
        self._forget(name, task)
        if not task.cancelled():
            task.exception()  # it may be that nobody waits for it any more

    def _forget(self, name: K, task: asyncio.Task[T]) -> None:
        flight = self._flights.get(name)
        if flight is not None and flight.task is task:
            del self._flights[name]
