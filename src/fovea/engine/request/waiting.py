"""Waiting for work in threads, from an event loop and from another thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fovea.core.errors import DeadlineExceeded, Unavailable

T = TypeVar("T")


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
