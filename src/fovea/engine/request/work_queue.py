"""Threads that prepare requests: cheap work overtakes expensive work, and never waits for all of it.

Decoding and resizing a photo takes milliseconds, and a picture of 50 megapixels a second. Tokenizing a
megabyte of text takes a second. In order of arrival, a few large images or texts would hold up everybody. So
work is done in the order of arrival plus a delay that grows with its cost, and expensive work never has all
threads.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from fovea.core.errors import Unavailable
from fovea.core.types import Prompt, TextPart, TextPrompt, TokenPrompt
from fovea.engine.request.waiting import wait_for_shared

T = TypeVar("T")
CHARACTERS = 20_000
"""Characters of text that cost as much as a megapixel."""
DELAY_S = 2.0
"""Delay per unit of cost: work that arrives up to this much later and costs nothing goes first."""
EXPENSIVE = 4.0
"""Work of more than this cost never has all threads. Pictures of phones cost 12."""


class WorkQueue:
    """A pool of threads with an order. Thread-safe.

    The unit of cost is a megapixel of an image's own resolution, about a hundredth of a second.
    """

    def __init__(
        self, threads: int, name: str, most_expensive: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """threads: their number. name: beginning of their names.

        most_expensive: how many of them may do expensive work at a time; 0: all but one.
        """
        self._most_expensive = most_expensive or max(1, threads - 1)
        self._clock = clock
        self._cheap: list[tuple[float, int, Future[Any], Callable[[], Any]]] = []
        self._expensive: list[tuple[float, int, Future[Any], Callable[[], Any]]] = []
        self._running_expensive = 0
        self._numbers = itertools.count()
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T], cost: float = 0.0) -> Future[T]:
        """Run `work` in a thread and return the future of its result. Raises Unavailable if closed.

        cost: megapixels that it has to decode, or `text_cost`.
        """
        future: Future[T] = Future()
        entry = (self._clock() + cost * DELAY_S, next(self._numbers), future, work)
        with self._changed:
            if self._closed:
                raise Unavailable("the engine has stopped")
            heapq.heappush(self._expensive if cost > EXPENSIVE else self._cheap, entry)
            self._changed.notify()
        return future

    async def run(self, work: Callable[[], T], cost: float = 0.0) -> T:
        """Run `work` in a thread and return its result. If the caller is cancelled, it may not be begun.

        Raises the error of `work`, and Unavailable if the queue is closed meanwhile.
        """
        future = self.submit(work, cost)
        try:
            await wait_for_shared(future)
        except asyncio.CancelledError:
            future.cancel()
            raise
        return future.result()

    def close(self) -> None:
        """Cancel the work that has not begun, and end the threads once they are free."""
        with self._changed:
            self._closed = True
            waiting = [entry[2] for entry in (*self._cheap, *self._expensive)]
            self._cheap, self._expensive = [], []
            self._changed.notify_all()
        for future in waiting:
            future.cancel()

    def _run(self) -> None:
        while (entry := self._take()) is not None:
            expensive, future, work = entry
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(work())
                    except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                        future.set_exception(error)
            finally:
                # Neither the work nor its result may live on in this thread while it waits.
                del entry, future, work
                if expensive:
                    with self._changed:
                        self._running_expensive -= 1
                        self._changed.notify()

    def _take(self) -> tuple[bool, Future[Any], Callable[[], Any]] | None:
        """Wait for work: whether it is expensive, its future and its function. None: the queue is closed."""
        with self._changed:
            while True:
                heap = self._next()
                if heap is not None:
                    _, _, future, work = heapq.heappop(heap)
                    expensive = heap is self._expensive
                    self._running_expensive += expensive
                    return expensive, future, work
                if self._closed:
                    return None
                self._changed.wait()

    def _next(self) -> list[tuple[float, int, Future[Any], Callable[[], Any]]] | None:
        """The heap from which to take now."""
        heaps = [heap for heap in (self._cheap, self._expensive) if heap]
        if self._running_expensive >= self._most_expensive:
            heaps = [heap for heap in heaps if heap is self._cheap]
        return min(heaps, key=lambda heap: heap[0][:2], default=None)


def text_cost(prompt: Prompt) -> float:
    """Return the cost of tokenizing a prompt, by the length of its text."""
    if isinstance(prompt, TokenPrompt):
        return 0.0
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) / CHARACTERS
    texts = (part.text for message in prompt.messages for part in message.parts if isinstance(part, TextPart))
    return sum(map(len, texts)) / CHARACTERS
