"""Threads that prepare requests, and waiting for their work from an event loop and from another thread.

Cheap work overtakes expensive work, and never waits for all of it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fovea.core.errors import DeadlineExceeded, Unavailable
from fovea.core.types import ChatPrompt, Prompt, TextPart, TextPrompt

T = TypeVar("T")
CHARACTERS = 20_000
"""Characters of text that cost as much as a megapixel."""
DELAY_S = 2.0
"""Delay per unit of cost: work that arrives up to this much later and costs nothing goes first."""
EXPENSIVE = 4.0
"""Work of more than this cost never has all threads. Pictures of phones cost 12."""


class WorkQueue:
    """A pool of threads with an order. Thread-safe.

    Decoding and resizing a photo takes milliseconds, and a picture of 50 megapixels a second. Tokenizing
    a megabyte of text takes a second. In order of arrival, a few large images or texts would hold up
    everybody. So work is done in the order of arrival plus a delay that grows with its cost, and
    expensive work never has all threads.

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


def text_cost(prompt: Prompt, prediction: str = "") -> float:
    """Return the cost of tokenizing a prompt, and a prediction of its answer, by the length of their text."""
    texts = [prediction]
    if isinstance(prompt, TextPrompt):
        texts.append(prompt.text)
    elif isinstance(prompt, ChatPrompt):
        parts = (part for message in prompt.messages for part in message.parts)
        texts += (part.text for part in parts if isinstance(part, TextPart))
    return sum(map(len, texts)) / CHARACTERS


@asynccontextmanager
async def request_timeout(seconds: float | None) -> AsyncIterator[None]:
    """Raise DeadlineExceeded if the body takes longer than the request's own timeout; None: no timeout.

    It covers the time before the engine's loop watches the deadline.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded("the request's timeout ran out", param="timeout") from error


async def wait_for_shared(future: Future[Any]) -> None:
    """Wait for a future that other requests may wait for, too. A cancelled waiter does not cancel the future.

    Raises Unavailable if the engine cancelled the future.
    """
    inner = asyncio.wrap_future(future)
    # If the waiter is cancelled, nobody looks at an error that comes later, and asyncio would log it.
    inner.add_done_callback(_retrieve)
    try:
        await asyncio.shield(inner)
    except asyncio.CancelledError:
        if future.cancelled():
            raise Unavailable("the engine has stopped") from None
        raise


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def result_before(deadline: float | None, future: Future[T]) -> T:
    """Wait in this thread for a future that other requests may wait for, too, and return its result.

    deadline: on the monotonic clock; None: no deadline.
    Raises DeadlineExceeded after the deadline, Unavailable if the engine cancelled the future.
    """
    try:
        return future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except CancelledError as error:
        raise Unavailable("the engine has stopped") from error
    except TimeoutError as error:
        if future.done():
            raise
        raise DeadlineExceeded("the request's timeout ran out", param="timeout") from error
