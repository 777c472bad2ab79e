"""Streams end if their backend is silent, and not while their client is slow."""

from __future__ import annotations

import asyncio
import math

import pytest

from fovea.gateway.generate.relay import TICK_S, SilenceWatch
from tests.gateway.samples import run

IDLE_S = 5.0


async def stream(watch: SilenceWatch, waits: list[tuple[float, float]], deadline: float = 1000.0) -> float:
    """Read a stream: seconds for the backend and for the client, by turns. Returns when it has ended."""
    loop = asyncio.get_running_loop()
    async with watch.watch(deadline) as silence:
        for backend, client in waits:
            silence.since = loop.time()
            await asyncio.sleep(backend)
            silence.since = math.inf
            await asyncio.sleep(client)
    return loop.time()


def ended(waits: list[tuple[float, float]], deadline: float = 1000.0) -> float | None:
    """When a stream ended by itself; None: it was ended."""

    async def scenario() -> float | None:
        watch = SilenceWatch(asyncio.get_running_loop().time, IDLE_S)
        try:
            return await stream(watch, waits, deadline)
        except TimeoutError:
            now = asyncio.get_running_loop().time()
            assert now <= min(deadline, sum(map(sum, waits)) + IDLE_S) + 2 * TICK_S
            return None
        finally:
            await watch.aclose()

    return run(scenario())


def test_pauses_below_the_limit() -> None:
    assert ended([(4.0, 0.0)] * 10) == 40.0


def test_a_silent_backend() -> None:
    assert ended([(1.0, 0.0), (60.0, 0.0)]) is None


def test_a_slow_client_is_not_the_backend() -> None:
    assert ended([(1.0, 60.0), (4.0, 60.0)]) == 125.0


def test_the_deadline_ends_a_stream_that_is_not_silent() -> None:
    assert ended([(1.0, 0.0)] * 100, deadline=20.0) is None
    assert ended([(1.0, 0.0)] * 15, deadline=20.0) == 15.0


def test_one_silent_stream_does_not_end_the_others() -> None:
    async def scenario() -> list[float | BaseException]:
        watch = SilenceWatch(asyncio.get_running_loop().time, IDLE_S)
        found = await asyncio.gather(
            stream(watch, [(50.0, 0.0)]),
            stream(watch, [(2.0, 0.0)] * 20),
            return_exceptions=True,
        )
        await watch.aclose()
        return found

    silent, busy = run(scenario())
    assert isinstance(silent, TimeoutError)
    assert busy == 40.0


def test_errors_and_cancellations_pass_through() -> None:
    async def scenario() -> None:
        watch = SilenceWatch(asyncio.get_running_loop().time, IDLE_S)
        with pytest.raises(ConnectionResetError):
            async with watch.watch(1000.0):
                raise ConnectionResetError
        task = asyncio.create_task(stream(watch, [(1.0, 0.0)] * 9))
        await asyncio.sleep(1.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await watch.aclose()

    run(scenario())


def test_closing_without_streams() -> None:
    async def scenario() -> None:
        await SilenceWatch(asyncio.get_running_loop().time, IDLE_S).aclose()

    run(scenario())
