"""Events for callers in event loops: one wake-up per loop and step, in order, whatever ends the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fovea.core.errors import DeadlineExceeded, EngineError, InvalidRequest
from fovea.engine.job import Event, Job
from fovea.engine.step.executor import StepResult
from tests.engine.step.test_job_board import WORD, Machine
from tests.support.poison import plain_tokenizer


class CountedLoop(asyncio.SelectorEventLoop):
    """An event loop that counts how often another thread wakes it."""

    wake_ups = 0

    def call_soon_threadsafe(self, *args: Any, **named: Any) -> asyncio.Handle:
        self.wake_ups += 1
        return super().call_soon_threadsafe(*args, **named)

    def settle(self) -> int:
        """Run the callbacks that wait. Returns the number of wake-ups since the last time."""
        self.run_until_complete(asyncio.sleep(0))
        woken, self.wake_ups = self.wake_ups, 0
        return woken


class Callers:
    """Callers in two event loops, whose jobs share the steps of one machine."""

    def __init__(self) -> None:
        self.machine = Machine(plain_tokenizer())
        self.loops = CountedLoop(), CountedLoop()
        self.queues: dict[str, asyncio.Queue[Event]] = {}

    def job(self, name: str, loop: int, **options: Any) -> Job:
        job = self.machine.job(name, **options)
        self.queues[name] = queue = asyncio.Queue()
        job.sink = self.machine.board.outbox.sink(self.loops[loop], queue)
        return job

    def wake_ups(self) -> list[int]:
        return [0 if loop.is_closed() else loop.settle() for loop in self.loops]

    def heard(self, name: str) -> list[Event]:
        queue = self.queues[name]
        return [queue.get_nowait() for _ in range(queue.qsize())]

    def close(self) -> None:
        for loop in self.loops:
            loop.close()


@pytest.fixture
def callers() -> Iterator[Callers]:
    made = Callers()
    yield made
    made.close()


def test_a_step_wakes_each_event_loop_once(callers: Callers) -> None:
    names = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1}
    callers.machine.board.add([callers.job(name, loop, max_tokens=4) for name, loop in names.items()])
    assert callers.wake_ups() == [0, 0]
    for number in range(4):
        callers.machine.step()
        assert callers.wake_ups() == [1, 1]
        for name in names:
            (event,) = callers.heard(name)
            assert [pick.token for pick in event.picks] == [WORD]
            assert event.finish_reason == ("length" if number == 3 else None)
    assert callers.machine.stepper.idle


def test_events_of_one_loop_stay_in_order(callers: Callers) -> None:
    queue: asyncio.Queue[Event] = asyncio.Queue()
    jobs = [callers.job(name, 0) for name in "abc"]
    for number, job in enumerate(jobs):
        job.choice = number
        job.sink = callers.machine.board.outbox.sink(callers.loops[0], queue)
    callers.machine.board.add(jobs)
    callers.machine.run()
    callers.wake_ups()
    assert [queue.get_nowait().choice for _ in range(queue.qsize())] == [0, 1, 2] * 3


def fail_one(callers: Callers) -> None:
    def fail(result: StepResult) -> None:
        result.sampled.pop("a:0", None)
        result.failures["a:0"] = ValueError("no candidate")

    callers.machine.step(fail)


ENDS: dict[str, tuple[Callable[[Callers], Any], str, type[Exception] | None]] = {
    "cancelled": (lambda callers: callers.machine.board.cancel(["a:0", "b:0"]), "abort", None),
    "expired": (
        lambda callers: callers.machine.board.fail(["a:0"], DeadlineExceeded("late")),
        "error",
        DeadlineExceeded,
    ),
    "failed": (fail_one, "error", EngineError),
    "dead": (
        lambda callers: callers.machine.board.fail_all(EngineError("it stopped")),
        "error",
        EngineError,
    ),
    "refused": (
        lambda callers: callers.machine.board.add([callers.job("a", 0)]),
        "error",
        InvalidRequest,
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_whatever_ends_an_answer_wakes_its_caller_at_once(callers: Callers, how: str) -> None:
    end, reason, error = ENDS[how]
    callers.machine.board.add([callers.job(name, 0, max_tokens=9) for name in "ab"])
    callers.machine.step()
    assert callers.wake_ups() == [1, 0]
    callers.heard("a")
    end(callers)
    assert callers.wake_ups() == [1, 0]
    event = callers.heard("a")[-1]
    assert event.finish_reason == reason
    assert error is None or isinstance(event.error, error)


def test_a_closed_event_loop_ends_its_own_jobs_only(callers: Callers) -> None:
    """A program that leaves `asyncio.run` early closes its loop, while its answers are generated."""
    callers.machine.board.add([callers.job("gone", 0, max_tokens=50), callers.job("good", 1)])
    callers.machine.step()
    callers.wake_ups()
    callers.loops[0].close()
    callers.machine.run()
    assert callers.wake_ups() == [0, 2]
    assert callers.heard("good")[-1].finish_reason == "length"


def test_a_loop_that_closes_within_a_step_loses_its_events_and_ends_no_other(callers: Callers) -> None:
    callers.machine.board.add([callers.job("gone", 0, max_tokens=50), callers.job("good", 1)])
    callers.machine.step()
    callers.wake_ups()
    post = callers.machine.board.jobs["good:0"].sink

    def close_then_post(event: Event) -> None:
        callers.loops[0].close()  # the event of the other job is in the outbox already
        post(event)

    callers.machine.board.jobs["good:0"].sink = close_then_post
    callers.machine.run()
    callers.wake_ups()
    assert callers.heard("good")[-1].finish_reason == "length"
