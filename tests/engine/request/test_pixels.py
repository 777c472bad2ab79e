"""Pixels are computed in worker threads, once for all requests; those that none has reserved are cached."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fovea.core.errors import Unavailable
from fovea.core.media import Image
from fovea.engine.request.pixels import PixelPool, PixelStore
from fovea.engine.request.prompt_plan import PlannedImage
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan

PIXEL_BYTES = 40
PLAN = VisualPlan(1, 1, 1, (1, 2, 2), "@", "plan")


class SlowProcessor:
    """A processor that waits for its gate, and notes the images that it processed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.processed: list[str] = []
        self.error: Exception | None = None

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        self.begun.release()
        assert self.gate.wait(20)
        self.processed.append(image.identity)
        if self.error is not None:
            raise self.error
        return ProcessedImage(image.identity, plan, {"pixel_values": np.zeros(PIXEL_BYTES // 4, np.float32)})


def planned(name: str) -> PlannedImage:
    return PlannedImage(Image(name, 1, 1, bytes(3)), PLAN, name)


@pytest.fixture
def slow() -> SlowProcessor:
    return SlowProcessor()


@pytest.fixture
def store(slow: SlowProcessor) -> Iterator[PixelStore]:
    processor: Any = slow
    store = PixelStore(processor, 2, PixelPool(100, cache_capacity=0))
    yield store
    slow.gate.set()
    store.close()


def test_all_requests_for_one_image_share_one_computation(store: PixelStore, slow: SlowProcessor) -> None:
    tasks = [store.task(planned("cat")) for _ in range(5)]
    assert len({id(task) for task in tasks}) == 1
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(task.start().result) for task in tasks]
        slow.gate.set()
        assert {future.result().identity for future in waiting} == {"cat"}
    assert slow.processed == ["cat"]


def test_pixels_are_computed_once_per_reservation_and_again_after_it(
    store: PixelStore, slow: SlowProcessor
) -> None:
    """Once, the first question about an image consumed its pixels, and a later one computed them again."""
    slow.gate.set()
    task = store.task(planned("cat"))
    reservation = store.pool.reserve([task])
    assert task().identity == task().identity == "cat"
    assert slow.processed == ["cat"]
    reservation.release()
    assert task().identity == "cat"
    assert slow.processed == ["cat", "cat"]


def test_different_images_are_computed_in_parallel(store: PixelStore, slow: SlowProcessor) -> None:
    futures = [store.task(planned(name)).start() for name in ("cat", "dog")]
    slow.gate.set()
    assert [future.result(20).identity for future in futures] == ["cat", "dog"]


def test_a_task_without_users_is_freed(store: PixelStore, slow: SlowProcessor) -> None:
    slow.gate.set()
    task = store.task(planned("cat"))
    task()
    del task
    gc.collect()
    assert len(store._tasks) == 0


def test_a_failure_reaches_all_requests_and_is_not_cached(store: PixelStore, slow: SlowProcessor) -> None:
    """Once, an error stayed with the task while any request held it, and failed every request that joined."""
    slow.gate.set()
    slow.error = MemoryError("for a moment")
    task = store.task(planned("cat"))
    with pytest.raises(MemoryError):
        task()
    with pytest.raises(MemoryError):
        task.start().result()
    slow.error = None
    assert task.start().result().identity == "cat"


def test_requests_that_wait_while_the_store_closes_get_unavailable(
    store: PixelStore, slow: SlowProcessor
) -> None:
    """Once they got a bare CancelledError, or a RuntimeError about futures."""
    tasks = [store.task(planned(name)) for name in ("a", "b", "waits", "late")]
    for task in tasks[:3]:
        task.start()  # two are being computed, the third waits for a worker
    assert slow.begun.acquire(timeout=20)
    assert slow.begun.acquire(timeout=20)
    store.close()
    slow.gate.set()
    for task in tasks[2:]:
        with pytest.raises(Unavailable, match="has stopped"):
            task()
    assert tasks[0]().identity == "a"


def test_pixels_stay_until_their_last_reservation_is_released(store: PixelStore, slow: SlowProcessor) -> None:
    """Once, a cancelled request dropped pixels that others shared, and they were computed again."""
    slow.gate.set()
    task = store.task(planned("cat"))
    first, second = store.pool.reserve([task]), store.pool.reserve([task])
    for reservation in (first, second):
        reservation.granted.result(1)
        task.start().result(20)
    first.release()
    first.release()
    task()
    assert slow.processed == ["cat"]
    second.release()
    task()
    assert slow.processed == ["cat", "cat"]


def test_the_next_reservation_of_an_image_takes_its_cached_pixels(slow: SlowProcessor) -> None:
    slow.gate.set()
    processor: Any = slow
    store = PixelStore(processor, 1, PixelPool(1000, cache_capacity=500))
    for _ in range(3):
        gc.freeze()  # so that the collection below visits only the objects of this test
        task = store.task(planned("cat"))
        reservation = store.pool.reserve([task])
        task.start().result(20)
        assert store.pool.stats().bytes == 0, "reserved pixels are not in the cache"
        reservation.release()
        assert store.pool.stats().bytes == PIXEL_BYTES
        del task, reservation
        gc.collect()
        gc.unfreeze()
        assert len(store._tasks) == 0, "the cache does not hold the decoded image"
    assert slow.processed == ["cat"]
    assert (store.pool.stats().hits, store.pool.stats().misses) == (2, 1)
    store.close()


def test_pixels_computed_without_a_reservation_go_to_the_cache(slow: SlowProcessor) -> None:
    """The encoder may need pixels that were not reserved, after the request has released its reservation."""
    slow.gate.set()
    processor: Any = slow
    store = PixelStore(processor, 1, PixelPool(1000, cache_capacity=500))
    task = store.task(planned("cat"))
    task()
    task()
    assert slow.processed == ["cat"]
    assert store.pool.stats().entries == 1
    store.close()


def test_a_request_that_comes_after_the_last_one_left_does_not_join_its_computation(
    store: PixelStore, slow: SlowProcessor
) -> None:
    """When the last request leaves, the decoding of its video stops. The next request begins again: otherwise
    it would get the error of one that has left.
    """
    task = store.task(planned("cat"))
    task.acquire()
    abandoned = task.start()
    assert slow.begun.acquire(timeout=20)
    task.release()
    task.acquire()
    assert task.start() is not abandoned
    slow.gate.set()
    assert task.start().result(20).identity == "cat"
    task.release()


def test_work_for_requests_that_left_is_not_done(store: PixelStore, slow: SlowProcessor) -> None:
    """Clients that sent large images and left at once filled the queue with work that nobody wanted: after
    six seconds of it, everybody else's small image waited for thirteen.
    """
    tasks = [store.task(planned(f"left {number}")) for number in range(10)]
    reservations = [store.pool.reserve([task]) for task in tasks]
    for task in tasks:
        task.start()
    assert slow.begun.acquire(timeout=20)
    assert slow.begun.acquire(timeout=20)
    for reservation in reservations:
        reservation.release()
    stayed = store.task(planned("stayed"))
    reservation = store.pool.reserve([stayed])
    future = stayed.start()
    slow.gate.set()
    assert future.result(20).identity == "stayed"
    done = set(slow.processed) - {"stayed"}
    assert len(done) <= 2, "only what had begun is done"
    reservation.release()
