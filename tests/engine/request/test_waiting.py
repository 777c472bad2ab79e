"""Waiting for work that several requests share."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future
from typing import Any

import pytest

from fovea.core.errors import Unavailable
from fovea.engine.request.work_queue import wait_for_shared


@pytest.mark.parametrize("others", [0, 1])
async def test_a_client_that_leaves_before_an_error_fills_no_log(others: int) -> None:
    """Clients left while their images were prepared, and the images turned out to be wrong. The log got a
    traceback, "Future exception was never retrieved", for every such client.
    """
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    shared: Future[None] = Future()
    gone = asyncio.create_task(wait_for_shared(shared))
    stays = [asyncio.create_task(wait_for_shared(shared)) for _ in range(others)]
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert not shared.cancelled(), "others may wait for it"
    shared.set_exception(ValueError("not an image"))
    for task in stays:
        with pytest.raises(ValueError, match="not an image"):
            await task
    await asyncio.sleep(0.01)
    del gone, stays, shared
    gc.collect()
    assert complaints == []


async def test_an_engine_that_stops_ends_the_wait() -> None:
    shared: Future[None] = Future()
    task = asyncio.create_task(wait_for_shared(shared))
    await asyncio.sleep(0)
    shared.cancel()
    with pytest.raises(Unavailable, match="the engine has stopped"):
        await task
