"""Reservations are granted in order within a ceiling; the cache uses the rest."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fovea.engine.request.pixels import PATIENCE_S, PixelPool, Reservation
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from tests.support.disks import Clock
from tests.support.thorough import examples

PLAN = VisualPlan(1, 1, 1, (1, 2, 2), "@", "plan")


class Item:
    """Something of `nbytes` bytes that counts its reservations."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.reservations = 0

    def acquire(self) -> None:
        self.reservations += 1

    def release(self) -> None:
        self.reservations -= 1


def pixels(size: int) -> ProcessedImage:
    return ProcessedImage("", PLAN, {"pixel_values": np.zeros(size, np.uint8)})


def granted(*reservations: Reservation) -> list[bool]:
    return [reservation.granted.done() for reservation in reservations]


def test_reservations_are_granted_in_order_within_the_ceiling() -> None:
    pool = PixelPool(100, cache_capacity=0)
    first = pool.reserve([Item(24) for _ in range(3)])
    second, third, fourth = (pool.reserve([Item(24)]) for _ in range(3))
    assert granted(first, second, third, fourth) == [True, True, False, False]
    assert pool.stats().reserved_bytes == 96
    second.release()
    assert granted(third, fourth) == [True, False]
    for reservation in (first, third, fourth, second):
        reservation.release()
    assert pool.stats().reserved_bytes == 0


def test_quick_reservations_do_not_wait_for_slow_ones() -> None:
    """Forty requests with images of 50 megapixels reserved all the room, and a small image waited for 6 s."""
    pool = PixelPool(100, cache_capacity=0)
    slow = [pool.reserve([Item(25)], slow=True) for _ in range(5)]
    assert granted(*slow) == [True, True, True, False, False], "they may fill three quarters"
    quick = [pool.reserve([Item(10)]) for _ in range(3)]
    assert granted(*quick) == [True, True, False]
    slow[0].release()
    assert granted(quick[2], slow[3], slow[4]) == [True, False, False]
    for reservation in quick:
        reservation.release()
    assert granted(slow[3], slow[4]) == [True, False]


def test_a_slow_reservation_does_not_wait_for_ever() -> None:
    clock = Clock()
    pool = PixelPool(100, cache_capacity=0, clock=clock)
    first, slow = pool.reserve([Item(60)]), pool.reserve([Item(90)], slow=True)
    clock.now += PATIENCE_S
    later = pool.reserve([Item(10)])
    assert granted(first, slow, later) == [True, False, False], "quick ones leave the room to it"
    first.release()
    assert granted(slow, later) == [True, True]


def test_a_reservation_of_nothing_neither_waits_nor_blocks_others() -> None:
    """Once, text requests queued behind images. And while any text ran, a large video could not begin."""
    pool = PixelPool(100, cache_capacity=0)
    text, large, small, later = (pool.reserve([], size) for size in (0, 101, 1, 0))
    assert granted(text, large, small, later) == [True, True, False, True]
    large.release()
    assert granted(small) == [True]


def test_a_reservation_beyond_the_ceiling_passes_alone() -> None:
    pool = PixelPool(100, cache_capacity=50)
    pool.keep("old", pixels(50))
    small = pool.reserve([Item(24)])
    large = pool.reserve([], extra_bytes=168)
    assert granted(large) == [False]
    small.release()
    assert granted(large) == [True]
    assert pool.stats().bytes == 0
    large.release()


def test_a_reservation_released_while_waiting_leaves_the_queue() -> None:
    pool = PixelPool(100, cache_capacity=0)
    first, released, last = pool.reserve([], 100), pool.reserve([], 24), pool.reserve([], 24)
    released.release()
    first.release()
    assert granted(released, last) == [False, True]
    assert pool.stats().reserved_bytes == 24


def test_an_item_reserved_twice_counts_once() -> None:
    item = Item(10)
    pool = PixelPool(100, cache_capacity=0)
    reservation = pool.reserve([item, item])
    reservation.add(item)
    assert (item.reservations, pool.stats().reserved_bytes) == (1, 10)
    late = Item(5)
    reservation.add(late)
    reservation.add(Item(7), already_counted=True)
    assert (late.reservations, pool.stats().reserved_bytes) == (1, 15)
    reservation.release()
    reservation.add(Item(5))
    assert (item.reservations, late.reservations, pool.stats().reserved_bytes) == (0, 0, 0)


def test_reservations_never_wait_for_the_cache() -> None:
    pool = PixelPool(100, cache_capacity=60)
    for name in "abc":
        pool.keep(name, pixels(30))
    assert (pool.stats().bytes, pool.stats().evictions) == (60, 1)
    reservation = pool.reserve([], 60)
    assert granted(reservation) == [True]
    assert (pool.stats().bytes, pool.take("b")) == (30, None)
    reservation.add(Item(20))
    assert pool.stats().bytes == 0, "the bytes that a reservation grows by need room, too"
    reservation.release()
    pool.keep("too large", pixels(61))
    assert pool.stats().entries == 0


def test_the_least_recently_reserved_goes_first_and_age_counts_from_there() -> None:
    clock = Clock()
    pool = PixelPool(100, cache_capacity=40, ttl_s=10, clock=clock)
    pool.keep("a", pixels(20))
    pool.keep("b", pixels(20))
    cached = pool.take("a")
    assert cached is not None
    pool.keep("a", cached)
    pool.keep("c", pixels(20))
    assert pool.take("b") is None
    clock.now += 11
    assert pool.take("a") is None
    assert (pool.stats().expired, pool.stats().entries, pool.stats().hits) == (2, 0, 1)


def test_clearing_leaves_reservations_alone() -> None:
    pool = PixelPool(100, cache_capacity=100)
    reservation = pool.reserve([], 10)
    pool.keep("a", pixels(20))
    pool.clear()
    assert (pool.stats().bytes, pool.stats().reserved_bytes) == (0, 10)
    reservation.release()


class PoolMachine(RuleBasedStateMachine):
    """A model of the pool: the reservations in order of arrival, and the pixels without a reservation."""

    @initialize(capacity=st.integers(1, 60), cache_bytes=st.integers(0, 60), ttl=st.sampled_from([None, 5.0]))
    def start(self, capacity: int, cache_bytes: int, ttl: float | None) -> None:
        self.clock = Clock()
        self.pool = PixelPool(capacity, cache_bytes, ttl, self.clock)
        self.cache_bytes = cache_bytes
        self.reservations: list[Reservation] = []
        self.empty_reservations: set[Reservation] = set()
        self.cached: dict[str, tuple[ProcessedImage, float]] = {}
        self.ttl = ttl

    @rule(size=st.integers(0, 70))
    def reserve(self, size: int) -> None:
        self.reservations.append(self.pool.reserve([Item(size)]))
        if not size:
            self.empty_reservations.add(self.reservations[-1])

    @rule(data=st.data(), size=st.integers(1, 20))
    def grow(self, data: Any, size: int) -> None:
        if self.reservations:
            data.draw(st.sampled_from(self.reservations)).add(Item(size))

    @rule(data=st.data())
    def release(self, data: Any) -> None:
        if self.reservations:
            reservation = data.draw(st.sampled_from(self.reservations))
            self.reservations.remove(reservation)
            reservation.release()

    @rule(key=st.sampled_from("abc"), size=st.integers(1, 30))
    def keep(self, key: str, size: int) -> None:
        image = pixels(size)
        self.pool.keep(key, image)
        self.cached[key] = image, self.clock.now

    @rule(key=st.sampled_from("abc"))
    def take(self, key: str) -> None:
        taken = self.pool.take(key)
        if taken is not None:
            image, added_at = self.cached.pop(key)
            assert taken is image
            assert self.ttl is None or self.clock.now - added_at < self.ttl

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "pool"):
            return
        in_use = [one for one in self.reservations if one.granted.done()]
        stats = self.pool.stats()
        assert stats.reserved_bytes == sum(one.size for one in in_use)
        assert stats.bytes <= max(0, min(self.cache_bytes, self.pool.capacity - stats.reserved_bytes))
        queued = [one for one in self.reservations if one not in self.empty_reservations]
        waiting = [one for one in self.reservations if not one.granted.done()]
        assert waiting == queued[len(queued) - len(waiting) :], "one was granted before an earlier one"
        assert not waiting or stats.reserved_bytes, "a reservation waits although nothing is reserved"
        assert not waiting or stats.reserved_bytes + waiting[0].size > self.pool.capacity


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
