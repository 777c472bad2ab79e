"""Open loops keep their times whatever the server does; closed loops wait for it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.bench.drive import LEAD_S, closed_loop, open_loop, watching_lag


class Clock:
    """Time passes when somebody sleeps, and by `slow` seconds at every look: a load generator that is busy."""

    def __init__(self, slow: float = 0.0) -> None:
        self.now = 100.0
        self.slow = slow

    def __call__(self) -> float:
        self.now += self.slow
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


async def times_of(clock: Clock, times: list[float]) -> list[tuple[float, float]]:
    """(when it was due, when it left) of each, from the start."""
    start = clock.now + LEAD_S

    async def send(_: int, due: float) -> tuple[float, float]:
        return due - start, clock.now - start

    return await open_loop([(at, 0) for at in times], send, clock=clock, sleep=clock.sleep)


async def test_requests_leave_when_they_are_due() -> None:
    found = await times_of(Clock(), [0.0, 0.5, 0.5, 2.0])
    assert [pytest.approx(due) for due, _ in found] == [0.0, 0.5, 0.5, 2.0]
    assert [pytest.approx(left) for _, left in found] == [0.0, 0.5, 0.5, 2.0]


async def test_a_load_generator_that_is_late_does_not_move_the_schedule() -> None:
    clock = Clock(slow=0.3)
    found = await times_of(clock, [0.0, 0.1, 0.2])
    dues = [due for due, _ in found]
    assert [due - dues[0] for due in dues] == pytest.approx([0.0, 0.1, 0.2])
    assert found[-1][1] - found[-1][0] > 0.3, "and it shows"


async def test_a_server_that_stands_still_is_still_asked() -> None:
    """The second request leaves although the first has no answer."""
    answered = asyncio.Event()

    async def send(number: int, _: float) -> int:
        if number == 0:
            await answered.wait()
        else:
            answered.set()
        return number

    assert await open_loop([(0.0, 0), (0.001, 1)], send) == [0, 1]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 6))
def test_a_closed_loop_never_asks_for_more_than_it_has_clients(lengths: list[int], clients: int) -> None:
    running = most = 0

    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(lengths[number]):
            await asyncio.sleep(0)
        running -= 1
        return number

    async def play() -> list[int]:
        return await closed_loop([lambda n=n: work(n) for n in range(len(lengths))], clients)  # type: ignore[misc]

    assert asyncio.run(play()) == list(range(len(lengths)))
    assert most <= clients
    assert most == min(clients, len(lengths)) or 0 in lengths


async def test_lag_is_noted_only_beside_requests() -> None:
    clock = Clock()
    for busy in (False, True):
        async with watching_lag(clock, lambda busy=busy: busy) as lag:  # type: ignore[misc]
            await asyncio.sleep(0.05)
        assert bool(lag.seen) is busy
