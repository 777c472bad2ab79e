"""Claims in order within a ceiling, and a cache in what they leave."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fovea.engine.request.pixel_pool import Claim, PixelPool
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from tests.support.disks import Clock

PLAN = VisualPlan(1, 1, 1, (1, 2, 2), "@", "plan")


class Thing:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.users = 0

    def use(self) -> None:
        self.users += 1

    def forget(self) -> None:
        self.users -= 1


def pixels(size: int) -> ProcessedImage:
    return ProcessedImage("", PLAN, {"pixel_values": np.zeros(size, np.uint8)})


def granted(*claims: Claim) -> list[bool]:
    return [claim.granted.done() for claim in claims]


def test_claims_are_granted_in_order_within_the_ceiling() -> None:
    pool = PixelPool(100, idle=0)
    first = pool.claim([Thing(24) for _ in range(3)])
    second, third, fourth = (pool.claim([Thing(24)]) for _ in range(3))
    assert granted(first, second, third, fourth) == [True, True, False, False]
    assert pool.stats().claimed == 96
    second.release()
    assert granted(third, fourth) == [True, False]
    for claim in (first, third, fourth, second):
        claim.release()
    assert pool.stats().claimed == 0


def test_who_claims_nothing_neither_waits_nor_is_waited_for() -> None:
    """Texts come without end: they stood in line behind images, and while any of them ran, a large video could not begin."""
    pool = PixelPool(100, idle=0)
    text, large, small, later = (pool.claim([], size) for size in (0, 101, 1, 0))
    assert granted(text, large, small, later) == [True, True, False, True]
    large.release()
    assert granted(small) == [True]


def test_a_claim_beyond_the_ceiling_passes_alone() -> None:
    pool = PixelPool(100, idle=50)
    pool.keep("old", pixels(50))
    small = pool.claim([Thing(24)])
    large = pool.claim([], beside=168)
    assert granted(large) == [False]
    small.release()
    assert granted(large) == [True]
    assert pool.stats().bytes == 0
    large.release()


def test_whoever_leaves_while_waiting_leaves_the_queue() -> None:
    pool = PixelPool(100, idle=0)
    held, gone, after = pool.claim([], 100), pool.claim([], 24), pool.claim([], 24)
    gone.release()
    held.release()
    assert granted(gone, after) == [False, True]
    assert pool.stats().claimed == 24


def test_a_thing_claimed_twice_is_one() -> None:
    thing = Thing(10)
    pool = PixelPool(100, idle=0)
    claim = pool.claim([thing, thing])
    claim.add(thing)
    assert (thing.users, pool.stats().claimed) == (1, 10)
    late = Thing(5)
    claim.add(late)
    claim.add(Thing(7), foreseen=True)
    assert (late.users, pool.stats().claimed) == (1, 15)
    claim.release()
    claim.add(Thing(5))
    assert (thing.users, late.users, pool.stats().claimed) == (0, 0, 0)


def test_claims_never_wait_for_the_cache() -> None:
    pool = PixelPool(100, idle=60)
    for name in "abc":
        pool.keep(name, pixels(30))
    assert (pool.stats().bytes, pool.stats().evictions) == (60, 1)
    claim = pool.claim([], 60)
    assert granted(claim) == [True]
    assert (pool.stats().bytes, pool.take("b")) == (30, None)
    claim.add(Thing(20))
    assert pool.stats().bytes == 0, "what a claim grows by needs room, too"
    claim.release()
    pool.keep("too large", pixels(61))
    assert pool.stats().entries == 0


def test_the_least_recently_claimed_goes_first_and_age_counts_from_there() -> None:
    clock = Clock()
    pool = PixelPool(100, idle=40, ttl_s=10, clock=clock)
    pool.keep("a", pixels(20))
    pool.keep("b", pixels(20))
    taken = pool.take("a")
    assert taken is not None
    pool.keep("a", taken)
    pool.keep("c", pixels(20))
    assert pool.take("b") is None
    clock.now += 11
    assert pool.take("a") is None
    assert (pool.stats().expired, pool.stats().entries, pool.stats().hits) == (2, 0, 1)


def test_clearing_leaves_claims_alone() -> None:
    pool = PixelPool(100, idle=100)
    claim = pool.claim([], 10)
    pool.keep("a", pixels(20))
    pool.clear()
    assert (pool.stats().bytes, pool.stats().claimed) == (0, 10)
    claim.release()


class PoolMachine(RuleBasedStateMachine):
    """A list of claims in order, and who has been let in."""

    @initialize(capacity=st.integers(1, 60), idle=st.integers(0, 60), ttl=st.sampled_from([None, 5.0]))
    def start(self, capacity: int, idle: int, ttl: float | None) -> None:
        self.clock = Clock()
        self.pool = PixelPool(capacity, idle, ttl, self.clock)
        self.idle = idle
        self.claims: list[Claim] = []
        self.nothing: set[Claim] = set()
        self.kept: dict[str, tuple[ProcessedImage, float]] = {}
        self.ttl = ttl

    @rule(size=st.integers(0, 70))
    def claim(self, size: int) -> None:
        self.claims.append(self.pool.claim([Thing(size)]))
        if not size:
            self.nothing.add(self.claims[-1])

    @rule(data=st.data(), size=st.integers(1, 20))
    def grow(self, data: Any, size: int) -> None:
        if self.claims:
            data.draw(st.sampled_from(self.claims)).add(Thing(size))

    @rule(data=st.data())
    def release(self, data: Any) -> None:
        if self.claims:
            claim = data.draw(st.sampled_from(self.claims))
            self.claims.remove(claim)
            claim.release()

    @rule(key=st.sampled_from("abc"), size=st.integers(1, 30))
    def keep(self, key: str, size: int) -> None:
        made = pixels(size)
        self.pool.keep(key, made)
        self.kept[key] = made, self.clock.now

    @rule(key=st.sampled_from("abc"))
    def take(self, key: str) -> None:
        found = self.pool.take(key)
        if found is not None:
            made, when = self.kept.pop(key)
            assert found is made
            assert self.ttl is None or self.clock.now - when < self.ttl

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = [claim for claim in self.claims if claim.granted.done()]
        stats = self.pool.stats()
        assert stats.claimed == sum(claim.size for claim in held)
        assert stats.bytes <= max(0, min(self.idle, self.pool.capacity - stats.claimed))
        lined_up = [claim for claim in self.claims if claim not in self.nothing]
        waiting = [claim for claim in self.claims if not claim.granted.done()]
        assert waiting == lined_up[len(lined_up) - len(waiting) :], "somebody was passed"
        assert not waiting or stats.claimed, "somebody waits for nobody"
        assert not waiting or stats.claimed + waiting[0].size > self.pool.capacity


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
