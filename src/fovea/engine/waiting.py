"""Waiting for work in threads from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from fovea.core.errors import DeadlineExceeded, Unavailable


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
