"""Pixels are made in worker threads, once for all who wait; what nobody claims any more is a cache's."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fovea.core.errors import Unavailable
from fovea.core.image import Image
from fovea.engine.request.pixel_pool import PixelPool
from fovea.engine.request.pixels import PixelStore
from fovea.engine.request.prompt_plan import PlannedImage
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan

PIXEL_BYTES = 40
PLAN = VisualPlan(1, 1, 1, (1, 2, 2), "@", "plan")


class Slow:
    """A processor that works when it is let, and counts."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.made: list[str] = []
        self.error: Exception | None = None

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        assert self.gate.wait(20)
        self.made.append(image.identity)
        if self.error is not None:
            raise self.error
        return ProcessedImage(image.identity, plan, {"pixel_values": np.zeros(PIXEL_BYTES // 4, np.float32)})


def planned(name: str) -> PlannedImage:
    return PlannedImage(Image(name, 1, 1, bytes(3)), PLAN, name)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def store(slow: Slow) -> Iterator[PixelStore]:
    processor: Any = slow
    made = PixelStore(processor, 2, PixelPool(100, idle=0))
    yield made
    slow.gate.set()
    made.close()


def test_all_who_wait_for_one_image_wait_for_one_piece_of_work(store: PixelStore, slow: Slow) -> None:
    tasks = [store.task(planned("cat")) for _ in range(5)]
    assert len({id(task) for task in tasks}) == 1
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(task.start().result) for task in tasks]
        slow.gate.set()
        assert {future.result().identity for future in waiting} == {"cat"}
    assert slow.made == ["cat"]


def test_reading_twice_makes_them_once_and_after_the_claim_again(store: PixelStore, slow: Slow) -> None:
    """The fifth of ten questions about one image made its pixels again, because the first had read them."""
    slow.gate.set()
    task = store.task(planned("cat"))
    claim = store.pool.claim([task])
    assert task().identity == task().identity == "cat"
    assert slow.made == ["cat"]
    claim.release()
    assert task().identity == "cat"
    assert slow.made == ["cat", "cat"]


def test_different_images_are_made_side_by_side(store: PixelStore, slow: Slow) -> None:
    futures = [store.task(planned(name)).start() for name in ("cat", "dog")]
    slow.gate.set()
    assert [future.result(20).identity for future in futures] == ["cat", "dog"]


def test_nothing_is_kept_when_nobody_asks_any_more(store: PixelStore, slow: Slow) -> None:
    slow.gate.set()
    task = store.task(planned("cat"))
    task()
    del task
    gc.collect()
    assert len(store._tasks) == 0


def test_a_failure_is_told_to_all_who_wait_and_not_remembered(store: PixelStore, slow: Slow) -> None:
    """It stayed with the task for as long as any request held it, and failed every one that joined them."""
    slow.gate.set()
    slow.error = MemoryError("for a moment")
    task = store.task(planned("cat"))
    with pytest.raises(MemoryError):
        task()
    with pytest.raises(MemoryError):
        task.start().result()
    slow.error = None
    assert task.start().result().identity == "cat"


def test_whoever_waits_when_the_store_closes_is_told(store: PixelStore, slow: Slow) -> None:
    """It was a bare CancelledError, or a RuntimeError about futures, from deep inside the standard library."""
    tasks = [store.task(planned(name)) for name in ("a", "b", "waits", "late")]
    for task in tasks[:3]:
        task.start()  # two are being made, the third waits for a worker
    store.close()
    slow.gate.set()
    for task in tasks[2:]:
        with pytest.raises(Unavailable, match="has stopped"):
            task()
    assert tasks[0]().identity == "a"


def test_one_request_letting_go_does_not_take_the_pixels_from_another(store: PixelStore, slow: Slow) -> None:
    """Pixels are shared; a cancelled request threw them away, and the engine's thread made them again."""
    slow.gate.set()
    task = store.task(planned("cat"))
    first, second = store.pool.claim([task]), store.pool.claim([task])
    for claim in (first, second):
        claim.granted.result(1)
        task.start().result(20)
    first.release()
    first.release()
    task()
    assert slow.made == ["cat"]
    second.release()
    task()
    assert slow.made == ["cat", "cat"]


def test_kept_pixels_are_taken_by_whoever_claims_the_image_next(slow: Slow) -> None:
    slow.gate.set()
    processor: Any = slow
    store = PixelStore(processor, 1, PixelPool(1000, idle=500))
    for _ in range(3):
        task = store.task(planned("cat"))
        claim = store.pool.claim([task])
        task.start().result(20)
        assert store.pool.stats().bytes == 0, "claimed pixels are no cache's"
        claim.release()
        assert store.pool.stats().bytes == PIXEL_BYTES
        del task, claim
        gc.collect()
        assert len(store._tasks) == 0, "the decoded image is not kept with them"
    assert slow.made == ["cat"]
    assert (store.pool.stats().hits, store.pool.stats().misses) == (2, 1)
    store.close()


def test_what_is_made_without_a_claim_is_the_caches(slow: Slow) -> None:
    """The encoder asks for pixels that nobody foresaw, after the request has let go."""
    slow.gate.set()
    processor: Any = slow
    store = PixelStore(processor, 1, PixelPool(1000, idle=500))
    task = store.task(planned("cat"))
    task()
    task()
    assert slow.made == ["cat"]
    assert store.pool.stats().entries == 1
    store.close()
