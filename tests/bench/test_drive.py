"""Open loops send at given times, whatever the server does. Closed loops wait for its answers."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.bench.workloads import LEAD_S, closed_loop, measure_lag, open_loop


class Clock:
    """A clock that advances when a task sleeps.

    slow: seconds by which every reading advances it, too, as if the load generator were busy.
    """

    def __init__(self, slow: float = 0.0) -> None:
        self.now = 100.0
        self.slow = slow

    def __call__(self) -> float:
        self.now += self.slow
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


async def send_times(clock: Clock, due: list[float]) -> list[tuple[float, float]]:
    """For each request, when it was due and when it was sent, in seconds from the start."""
    start = clock.now + LEAD_S

    async def send(_: int, due: float) -> tuple[float, float]:
        return due - start, clock.now - start

    return await open_loop([(at, 0) for at in due], send, clock=clock, sleep=clock.sleep)


async def test_open_loop_sends_requests_when_they_are_due() -> None:
    times = await send_times(Clock(), [0.0, 0.5, 0.5, 2.0])
    assert [pytest.approx(due) for due, _ in times] == [0.0, 0.5, 0.5, 2.0]
    assert [pytest.approx(sent) for _, sent in times] == [0.0, 0.5, 0.5, 2.0]


async def test_slow_load_generator_does_not_shift_the_schedule() -> None:
    clock = Clock(slow=0.3)
    times = await send_times(clock, [0.0, 0.1, 0.2])
    dues = [due for due, _ in times]
    assert [due - dues[0] for due in dues] == pytest.approx([0.0, 0.1, 0.2])
    assert times[-1][1] - times[-1][0] > 0.3, "the delay is measured"


async def test_open_loop_does_not_wait_for_answers() -> None:
    """The second request is sent although the first has no answer yet."""
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
def test_closed_loop_runs_at_most_one_call_per_client(lengths: list[int], clients: int) -> None:
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


async def test_lag_and_processor_time_count_only_while_requests_run() -> None:
    """Every reading of the clock is 2 ms later, and every reading of the processor time 1 ms."""
    clock, cpu = Clock(slow=0.002), Clock(slow=0.001)
    for busy in (False, True):
        async with measure_lag(clock, lambda busy=busy: busy, cpu) as lag:  # type: ignore[misc]
            await asyncio.sleep(0.05)
        assert bool(lag.delays) is busy
        assert math.isnan(lag.core_share) is not busy
    assert lag.core_share == pytest.approx(0.5)
