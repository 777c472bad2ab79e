"""The fair queue for tasks: waking, cancelling, deadlines, and no suspension while there is room."""

from __future__ import annotations

import asyncio

import pytest

from fovea.core.errors import DeadlineExceeded, Overloaded
from fovea.gateway.fair_queue import QueueSlot
from fovea.gateway.queues import SlotQueue
from fovea.gateway.settings import QueueSettings


def slots(tokens: int = 100, requests: int = 1, **values: int) -> SlotQueue:
    return SlotQueue(QueueSettings(**values), tokens, requests, asyncio.get_running_loop().time)  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_with_room_the_task_is_not_suspended() -> None:
    queue = slots(requests=2)
    steps = queue.acquire("a", cost=10)
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    slot = end.value.value
    assert isinstance(slot, QueueSlot)
    assert queue.queue.running_tokens == 10
    queue.release(slot)
    queue.release(slot)
    assert queue.queue.running == 0


async def test_a_waiting_task_gets_its_turn_when_another_ends() -> None:
    queue, order = slots(), []

    async def work(name: str) -> None:
        slot = await queue.acquire(name)
        order.append(name)
        await asyncio.sleep(0)
        queue.release(slot)

    first = await queue.acquire("first")
    tasks = [asyncio.create_task(work(name)) for name in ("a", "a", "b")]
    await settle()
    assert order == []
    queue.release(first)
    await asyncio.gather(*tasks)
    assert sorted(order) == ["a", "a", "b"]
    assert (queue.queue.running, queue.queue.waiting) == (0, 0)


async def test_a_cancelled_task_leaves_the_queue() -> None:
    queue = slots()
    first = await queue.acquire("a")
    doomed, later = (asyncio.create_task(queue.acquire("a")) for _ in range(2))
    await settle()
    doomed.cancel()
    await settle()
    assert queue.queue.waiting == 1
    queue.release(first)
    queue.release(await later)
    assert doomed.cancelled()
    assert queue.queue.running == 0


async def test_a_turn_that_comes_together_with_the_cancellation_is_given_back() -> None:
    queue = slots()
    first = await queue.acquire("a")
    doomed, later = (asyncio.create_task(queue.acquire("a")) for _ in range(2))
    await settle()
    queue.release(
        first
    )  # the slot is the doomed task's from here on, but it does not run before it is cancelled
    doomed.cancel()
    slot = await later
    assert (queue.queue.running, queue.queue.waiting) == (1, 0)
    queue.release(slot)


async def test_the_deadline_ends_the_wait() -> None:
    queue = slots()
    first = await queue.acquire("a")
    now_s = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded, match="while it waited for a backend"):
        await queue.acquire("a", deadline_s=now_s + 0.01)
    with pytest.raises(DeadlineExceeded):
        await queue.acquire("a", deadline_s=now_s - 1)
    assert queue.queue.waiting == 0
    queue.release(first)
    queue.release(await queue.acquire("a", deadline_s=now_s + 60))


async def test_a_full_queue_refuses() -> None:
    queue = slots(queue_length_per_tenant=1)
    first = await queue.acquire("a")
    waiting = asyncio.create_task(queue.acquire("a"))
    await settle()
    with pytest.raises(Overloaded) as refused:
        await queue.acquire("a")
    assert refused.value.retry_after == 60, "nothing has ended yet, so the longest time is given"
    queue.release(first)
    queue.release(await waiting)


async def test_more_capacity_wakes_tasks() -> None:
    queue = slots(tokens=0, requests=0)
    task = asyncio.create_task(queue.acquire("a", cost=50))
    await settle()
    assert not task.done()
    queue.resize(100, 4)
    queue.release(await task)


@pytest.mark.parametrize("weight", [0, -1, float("nan")])
async def test_weights_are_positive(weight: float) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        await slots().acquire("a", weight=weight)
