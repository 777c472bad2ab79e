"""Work that is asked for by several at once is done once, whoever of them leaves."""

from __future__ import annotations

import asyncio
import gc

import pytest

from fovea.media.flight import SingleFlight


class Work:
    """Goes on when it is told to; counts how often it was begun, and cancelled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = 0
        self.cancelled = 0
        self.go = asyncio.Event()
        self._error = error

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        return number


async def begun(flights: SingleFlight[str, int], work: Work, count: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(flights.run("a", work)) for _ in range(count)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def left(task: asyncio.Task[int]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_all_who_ask_at_once_get_one_result() -> None:
    flights, work = SingleFlight[str, int](), Work()
    tasks = await begun(flights, work, 3)
    assert "a" in flights
    work.go.set()
    assert await asyncio.gather(*tasks) == [1, 1, 1]
    assert "a" not in flights
    assert await flights.run("a", work) == 2, "nothing is remembered"


async def test_names_are_apart() -> None:
    flights, work = SingleFlight[str, int](), Work()
    work.go.set()
    assert sorted(await asyncio.gather(flights.run("a", work), flights.run("b", work))) == [1, 2]


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_who_leaves_takes_nothing_from_the_others(leaver: int) -> None:
    """The first one began the work: it goes on without it, too."""
    flights, work = SingleFlight[str, int](), Work()
    tasks = await begun(flights, work, 3)
    await left(tasks.pop(leaver))
    work.go.set()
    assert await asyncio.gather(*tasks) == [1, 1]
    assert (work.begun, work.cancelled) == (1, 0)


async def test_when_the_last_one_leaves_the_work_ends() -> None:
    flights, work = SingleFlight[str, int](), Work()
    for task in await begun(flights, work, 2):
        await left(task)
    await asyncio.sleep(0)
    assert (work.begun, work.cancelled) == (1, 1)
    assert "a" not in flights


async def test_who_comes_after_the_last_one_left_begins_anew() -> None:
    """In the same turn of the loop, before the work has heard that it is cancelled."""
    flights, work = SingleFlight[str, int](), Work()
    (first,) = await begun(flights, work, 1)
    first.cancel()
    second = asyncio.create_task(flights.run("a", work))
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.sleep(0)
    work.go.set()
    assert await second == 2
    assert work.cancelled == 1


async def test_an_error_reaches_everyone_and_is_not_remembered() -> None:
    flights, work = SingleFlight[str, int](), Work(ValueError("no"))
    tasks = await begun(flights, work, 3)
    work.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(result) for result in results] == ["no"] * 3
    with pytest.raises(ValueError, match="no"):
        await flights.run("a", work)
    assert work.begun == 2


async def test_an_error_that_nobody_waits_for_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    flights, work = SingleFlight[str, int](), Work(ValueError("no"))
    (task,) = await begun(flights, work, 1)
    work.go.set()
    await asyncio.sleep(0)
    await left(task)
    await asyncio.sleep(0)
    gc.collect()
    assert caplog.records == []
