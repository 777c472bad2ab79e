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
async def deadline(seconds: float | None) -> AsyncIterator[None]:
    """A request's own timeout, for what happens before the loop watches it."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded("the request's timeout ran out", param="timeout") from error


async def shared(future: Future[Any]) -> None:
    """Wait for what others may wait for too: leaving early must not cancel it for them."""
    try:
        await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        if future.cancelled():
            raise Unavailable("the engine has stopped") from None
        raise


def until(ends: float | None, future: Future[T]) -> T:
    """The same for a thread, with the result. ends: on the monotonic clock; None: no deadline."""
    try:
        return future.result(None if ends is None else max(0.0, ends - time.monotonic()))
    except CancelledError as error:
        raise Unavailable("the engine has stopped") from error
    except TimeoutError as error:
        if future.done():
            raise
        raise DeadlineExceeded("the request's timeout ran out", param="timeout") from error
