"""The threads that compute pixels: who goes first, and what never waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest

from fovea.core.errors import Unavailable
from fovea.core.types import ChatPrompt, Message, TextPart, TextPrompt, TokenPrompt
from fovea.engine.request.work_queue import DELAY_S, EXPENSIVE, WorkQueue, text_cost

PATIENCE = 20


class Desk:
    """A work queue whose threads are busy until `open`, with a clock set by hand; it notes what was done."""

    def __init__(self, threads: int) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self.queue = WorkQueue(threads, "test", clock=lambda: self.now)
        self._gate = threading.Event()
        self._threads = threads

    def block(self) -> None:
        busy = threading.Semaphore(0)

        def wait() -> None:
            busy.release()
            assert self._gate.wait(PATIENCE)

        for _ in range(self._threads):
            self.queue.submit(wait)
        for _ in range(self._threads):
            assert busy.acquire(timeout=PATIENCE)

    def ask(self, name: str, cost: float = 0.0) -> None:
        self.last = self.queue.submit(lambda: self.done.append(name), cost)

    def open(self) -> None:
        self._gate.set()


@pytest.fixture
def new_desk() -> Iterator[Callable[[int], Desk]]:
    desks: list[Desk] = []

    def new(threads: int) -> Desk:
        desks.append(Desk(threads))
        return desks[-1]

    yield new
    for desk in desks:
        desk.open()
        desk.queue.close()


def test_cheap_work_overtakes_expensive_work_but_not_for_ever(new_desk: Callable[[int], Desk]) -> None:
    """Forty requests with images of 50 megapixels once stood before everybody else's small ones."""
    desk = new_desk(1)
    desk.block()
    desk.ask("large", 50)
    desk.now = 1.0
    desk.ask("small", 1)
    desk.ask("small, a little later", 1)
    desk.now = 50 * DELAY_S + 1
    desk.ask("small, much later", 1)
    desk.open()
    desk.last.result(PATIENCE)
    assert desk.done == ["small", "small, a little later", "large", "small, much later"]


def test_expensive_work_never_has_all_threads(new_desk: Callable[[int], Desk]) -> None:
    desk = new_desk(3)
    gate, running = threading.Event(), threading.Semaphore(0)

    def large() -> None:
        running.release()
        assert gate.wait(PATIENCE)

    futures = [desk.queue.submit(large, EXPENSIVE + 1) for _ in range(3)]
    assert running.acquire(timeout=PATIENCE)
    assert running.acquire(timeout=PATIENCE)
    desk.ask("small", 1)
    desk.last.result(PATIENCE)
    assert not running.acquire(blocking=False)
    assert not any(future.done() for future in futures)
    gate.set()
    for future in futures:
        future.result(PATIENCE)


def test_one_thread_does_everything(new_desk: Callable[[int], Desk]) -> None:
    desk = new_desk(1)
    desk.ask("large", EXPENSIVE + 1)
    desk.last.result(PATIENCE)
    assert desk.done == ["large"]


def test_errors_and_closing(new_desk: Callable[[int], Desk]) -> None:
    desk = new_desk(1)

    def broken() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        desk.queue.submit(broken).result(PATIENCE)
    desk.block()
    desk.ask("waits")
    desk.queue.close()
    with pytest.raises(CancelledError):
        desk.last.result(PATIENCE)
    with pytest.raises(Unavailable, match="has stopped"):
        desk.ask("late")


def test_the_cost_of_a_text_is_its_length() -> None:
    """Sixteen clients that had a megabyte of text counted made short questions of others wait for seconds."""
    long = "x" * 1_000_000
    parts = (TextPart("hello"), TextPart(long))
    assert text_cost(TextPrompt(long)) > EXPENSIVE
    assert text_cost(ChatPrompt((Message("user", parts), Message("user", parts)))) > 2 * EXPENSIVE
    assert text_cost(TextPrompt("hello")) < 0.01
    assert text_cost(TokenPrompt((1, 2, 3))) == 0


def test_work_whose_client_has_left_is_not_done(new_desk: Callable[[int], Desk]) -> None:
    desk = new_desk(1)
    desk.block()
    desk.ask("left")
    desk.last.cancel()
    desk.ask("stayed")
    desk.open()
    desk.last.result(PATIENCE)
    assert desk.done == ["stayed"]


async def test_a_waiting_client_learns_that_the_engine_has_stopped(new_desk: Callable[[int], Desk]) -> None:
    desk = new_desk(1)
    desk.block()
    waiting = asyncio.create_task(desk.queue.run(lambda: "never"))
    await asyncio.sleep(0)
    desk.queue.close()
    with pytest.raises(Unavailable, match="has stopped"):
        await waiting


async def test_a_client_that_leaves_takes_its_work_along(new_desk: Callable[[int], Desk]) -> None:
    desk = new_desk(1)
    desk.block()
    waiting = asyncio.create_task(desk.queue.run(lambda: desk.done.append("left")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    desk.ask("stayed")
    desk.open()
    desk.last.result(PATIENCE)
    assert desk.done == ["stayed"]
