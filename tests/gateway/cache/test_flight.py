"""Equal requests at the same time: one leads, all get its answer, and nobody is forgotten."""

from __future__ import annotations

import asyncio
import random

import pytest

from fovea.gateway.cache.answers import Entry
from fovea.gateway.cache.flight import Flights, Seat

ENTRY = Entry(b"{}", 1.0, True)


async def seats(flights: Flights, count: int) -> tuple[Seat, list[Seat], list[asyncio.Task[Entry | None]]]:
    """A leader and requests that wait for it."""
    leader = flights.join("k")
    followers = [flights.join("k") for _ in range(count)]
    tasks = [asyncio.create_task(seat.wait(60)) for seat in followers]
    await asyncio.sleep(0)
    assert leader.leads
    return leader, followers, tasks


async def test_all_get_the_answer_of_the_leader() -> None:
    flights = Flights()
    leader, _, tasks = await seats(flights, 3)
    leader.land(ENTRY)
    assert await asyncio.gather(*tasks) == [ENTRY] * 3
    assert len(flights) == 0
    assert flights.join("k").leads


async def test_another_key_does_not_wait() -> None:
    flights = Flights()
    assert flights.join("a").leads
    assert flights.join("b").leads


async def test_one_after_the_other_leads_if_leaders_fail() -> None:
    flights = Flights()
    leader, followers, tasks = await seats(flights, 3)
    leader.leave()
    assert await tasks[0] is None
    assert [seat.leads for seat in followers] == [True, False, False]
    followers[0].leave()
    followers[0].leave()
    assert await tasks[1] is None
    assert followers[1].leads
    followers[1].land(ENTRY)
    assert await tasks[2] == ENTRY
    assert len(flights) == 0


async def test_all_go_alone_if_the_answer_cannot_be_stored() -> None:
    flights = Flights()
    leader, followers, tasks = await seats(flights, 2)
    leader.scatter()
    assert await asyncio.gather(*tasks) == [None, None]
    assert not any(seat.leads for seat in followers)
    assert len(flights) == 0


async def test_a_cancelled_request_is_passed_over() -> None:
    flights = Flights()
    leader, followers, tasks = await seats(flights, 3)
    tasks[0].cancel()
    await asyncio.sleep(0)
    leader.leave()
    # The next one leads, and is cancelled before it runs.
    tasks[1].cancel()
    assert await tasks[2] is None
    assert followers[2].leads
    followers[2].leave()
    assert len(flights) == 0


async def test_a_request_whose_deadline_is_over_goes_alone() -> None:
    flights = Flights()
    leader = flights.join("k")
    late = flights.join("k")
    assert await late.wait(0.001) is None
    assert not late.leads
    leader.land(ENTRY)
    assert len(flights) == 0


async def test_a_request_that_begins_to_wait_too_late_goes_alone() -> None:
    flights = Flights()
    leader, late = flights.join("k"), flights.join("k")
    leader.land(ENTRY)
    assert await late.wait(60) is None
    assert not late.leads


@pytest.mark.parametrize("seed", range(5))
async def test_nobody_hangs_whatever_leaders_do(seed: int) -> None:
    """Leaders end in all ways and requests are cancelled at random; every one of them ends."""
    rng, flights = random.Random(seed), Flights()

    async def request() -> str:
        seat = flights.join("k")
        entry = None if seat.leads else await seat.wait(30)
        if entry is not None:
            return "answered"
        if not seat.leads:
            return "alone"
        try:
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                rng.choice([lambda: seat.land(ENTRY), seat.scatter])()
        finally:
            seat.leave()
        return "led"

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(request()))
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
        if rng.random() < 0.2:
            await asyncio.sleep(0)
    async with asyncio.timeout(20):
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert {end for end in ends if isinstance(end, str)} >= {"answered", "led"}
    assert all(isinstance(end, str | asyncio.CancelledError) for end in ends)
    assert len(flights) == 0
