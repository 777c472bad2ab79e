"""Queues of models: their capacities follow the backends, and full ones lower images."""

from __future__ import annotations

from typing import Any

import pytest

from fovea.gateway.config import BackendConfig
from fovea.gateway.fair_queue import QueueSlot
from fovea.gateway.queues import ENDLESS, Queues
from fovea.gateway.settings import QueueSettings, RouteSettings
from tests.gateway.samples import MODEL, fleet


def config(name: str, **options: Any) -> BackendConfig:
    return BackendConfig(f"http://{name}:1", name, ("m",), **options)


def queues(*configs: BackendConfig, workers: int = 1, **route: Any) -> Queues:
    return Queues(fleet(configs), RouteSettings(**route), QueueSettings(), workers, lambda: 0.0)


@pytest.mark.parametrize(
    ("options", "workers", "route", "capacity"),
    [
        ([{"max_tokens": 100, "max_requests": 4}], 1, {}, (100, 4)),
        ([{"max_tokens": 100, "max_requests": 4}] * 3, 1, {}, (300, 12)),
        ([{"max_tokens": 100, "max_requests": 4}] * 3, 2, {}, (150, 6)),
        ([{"max_tokens": 3, "max_requests": 3}], 8, {}, (1, 1)),
        ([{"max_tokens": 100}, {}], 1, {}, (ENDLESS, 512)),
        ([{}], 1, {"tokens_per_backend": 7, "requests_per_backend": 9}, (7, 9)),
        ([{}], 4, {"requests_per_backend": 0}, (ENDLESS // 4, ENDLESS // 4)),
        ([], 1, {}, (ENDLESS, ENDLESS)),
    ],
)
def test_the_capacity_of_a_worker(
    options: list[Any], workers: int, route: Any, capacity: tuple[int, int]
) -> None:
    made = queues(*(config(f"b{n}", **each) for n, each in enumerate(options)), workers=workers, **route)
    assert made.of(MODEL).queue.capacity == capacity
    assert made.of(MODEL) is made.of(MODEL)


async def test_images_are_lowered_under_load() -> None:
    made = queues(config("a", max_requests=10, max_tokens=1000))
    queue, slots = made.of(MODEL), list[QueueSlot]()
    seen = [made.degrade(MODEL)]
    for _ in range(10):
        slots.append(await queue.acquire("t", cost=10))
        seen.append(made.degrade(MODEL))
    assert seen == [""] * 9 + ["medium", "low"]
    for slot in slots:
        queue.release(slot)
    assert made.degrade(MODEL) == ""
    queue.release(await queue.acquire("t", cost=950))
    slot = await queue.acquire("t", cost=950)
    assert made.degrade(MODEL) == "medium"
    queue.release(slot)
    never = queues(config("a", max_requests=1), degrade_at=0)
    await never.of(MODEL).acquire("t")
    assert never.degrade(MODEL) == ""


async def test_queues_follow_their_backends() -> None:
    backends = fleet([config("a", max_requests=2)])
    made = Queues(backends, RouteSettings(), QueueSettings(), 1, lambda: 0.0)
    queue = made.of(MODEL)
    backends.update([config("a", max_requests=2), config("b", max_requests=3)], 0.0)
    made.resize()
    assert queue.queue.capacity[1] == 5
    slot = await queue.acquire("t")
    backends.update([], 0.0)
    made.resize()
    assert [name for name, _ in made] == ["m"]  # its request is still running
    queue.release(slot)
    made.resize()
    assert list(made) == []
