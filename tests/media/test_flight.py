"""Simultaneous calls for the same work share one task, whichever caller is cancelled."""

from __future__ import annotations

import asyncio
import gc

import pytest

from fovea.media.fetch.fetcher import SingleFlight


class Work:
    """Work that ends when `go` is set. starts, cancelled: how often it was started and cancelled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.starts = 0
        self.cancelled = 0
        self.go = asyncio.Event()
        self._error = error

    async def __call__(self) -> int:
        self.starts += 1
        number = self.starts
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        return number


async def start_callers(flights: SingleFlight[str, int], work: Work, count: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(flights.run("a", work)) for _ in range(count)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def cancel_caller(task: asyncio.Task[int]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_simultaneous_callers_share_one_result() -> None:
    flights, work = SingleFlight[str, int](), Work()
    tasks = await start_callers(flights, work, 3)
    assert "a" in flights
    work.go.set()
    assert await asyncio.gather(*tasks) == [1, 1, 1]
    assert "a" not in flights
    assert await flights.run("a", work) == 2, "results are not stored"


async def test_keys_are_independent() -> None:
    flights, work = SingleFlight[str, int](), Work()
    work.go.set()
    assert sorted(await asyncio.gather(flights.run("a", work), flights.run("b", work))) == [1, 2]


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_cancelling_one_caller_does_not_affect_the_others(leaver: int) -> None:
    """The first caller started the task, which continues without it, too."""
    flights, work = SingleFlight[str, int](), Work()
    tasks = await start_callers(flights, work, 3)
    await cancel_caller(tasks.pop(leaver))
    work.go.set()
    assert await asyncio.gather(*tasks) == [1, 1]
    assert (work.starts, work.cancelled) == (1, 0)


async def test_the_task_is_cancelled_with_its_last_caller() -> None:
    flights, work = SingleFlight[str, int](), Work()
    for task in await start_callers(flights, work, 2):
        await cancel_caller(task)
    await asyncio.sleep(0)
    assert (work.starts, work.cancelled) == (1, 1)
    assert "a" not in flights


async def test_a_call_after_the_last_cancellation_starts_a_new_task() -> None:
    """The call comes in the same iteration of the loop, before the old task handles its cancellation."""
    flights, work = SingleFlight[str, int](), Work()
    (first,) = await start_callers(flights, work, 1)
    first.cancel()
    second = asyncio.create_task(flights.run("a", work))
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.sleep(0)
    work.go.set()
    assert await second == 2
    assert work.cancelled == 1


async def test_an_error_reaches_every_caller_and_is_not_stored() -> None:
    flights, work = SingleFlight[str, int](), Work(ValueError("no"))
    tasks = await start_callers(flights, work, 3)
    work.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(result) for result in results] == ["no"] * 3
    with pytest.raises(ValueError, match="no"):
        await flights.run("a", work)
    assert work.starts == 2


async def test_an_error_without_a_waiting_caller_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    flights, work = SingleFlight[str, int](), Work(ValueError("no"))
    (task,) = await start_callers(flights, work, 1)
    work.go.set()
    await asyncio.sleep(0)
    await cancel_caller(task)
    await asyncio.sleep(0)
    gc.collect()
    assert caplog.records == []
