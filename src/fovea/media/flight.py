"""Shares one task between callers that request the same work at the same time."""

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
    """Runs one task per key at a time. All callers that wait for it get its result or its error.

    Results are not stored: a call after the task's end starts a new task. Use it within one event loop.
    """

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[T]] = {}

    def __contains__(self, key: K) -> bool:
        """Whether a task for this key is running now."""
        return key in self._flights

    async def run(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the running task for this key; if there is none, start one with `work`.

        Cancelling a caller does not affect the others. The task is cancelled with its last caller.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()))
            flight.task.add_done_callback(lambda task: self._finish(key, task))
        flight.waiting += 1
        try:
            # Unlike awaiting the task, this does not cancel it with the caller.
            await asyncio.wait((flight.task,))
            return flight.task.result()
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                # Remove it now, so that the next caller does not join a task that is being cancelled.
                self._remove(key, flight.task)
                flight.task.cancel()

    def _finish(self, key: K, task: asyncio.Task[T]) -> None:
        self._remove(key, task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; otherwise asyncio logs it if no caller waits any more

    def _remove(self, key: K, task: asyncio.Task[T]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
