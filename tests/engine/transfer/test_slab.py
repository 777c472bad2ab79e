"""The bookkeeping of a slab: extents never overlap, and nothing is lost."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fovea.engine.transfer.slab import UNIT, Extent, Slab

SIZE = 64 * UNIT


class Lending(RuleBasedStateMachine):
    """Compares a slab with a list of all leases and pins, and when each ends."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = Slab(SIZE, lease_s=10.0)
        self.now = 0.0
        self.extents: dict[int, Extent] = {}
        self.ends: dict[int, float] = {}
        self.pins: dict[tuple[int, int], float] = {}  # end by lease and holder

    def used(self) -> dict[int, Extent]:
        pinned = {lease for lease, _ in self.pins}
        return {lease: each for lease, each in self.extents.items() if lease in self.ends or lease in pinned}

    def lease(self, index: int) -> int:
        """A lease that was given once, or one that never was."""
        leases = [*self.extents, 10**6]
        return leases[index % len(leases)]

    @rule(size=st.integers(0, SIZE + UNIT))
    def take(self, size: int) -> None:
        extent = self.slab.take(size, self.now)
        if extent is None:
            assert size > 0
            return
        assert extent.size >= size
        assert extent.start % UNIT == extent.size % UNIT == 0
        assert extent.start + extent.size <= SIZE
        for other in self.used().values():
            assert extent.start + extent.size <= other.start or other.start + other.size <= extent.start
        assert extent.lease not in self.extents
        self.extents[extent.lease] = extent
        self.ends[extent.lease] = self.now + 10.0

    @rule(index=st.integers(0, 50))
    def extend(self, index: int) -> None:
        lease = self.lease(index)
        assert self.slab.extend(lease, self.now) == (lease in self.ends)
        if lease in self.ends:
            self.ends[lease] = self.now + 10.0

    @rule(index=st.integers(0, 50), holder=st.integers(0, 2), for_s=st.integers(1, 30))
    def pin(self, index: int, holder: int, for_s: int) -> None:
        lease = self.lease(index)
        assert self.slab.pin(lease, holder, self.now + for_s) == (lease in self.ends)
        if lease in self.ends:
            self.pins[lease, holder] = self.now + for_s

    @rule(holder=st.integers(0, 2), index=st.none() | st.integers(0, 50))
    def unpin(self, holder: int, index: int | None) -> None:
        lease = None if index is None else self.lease(index)
        self.slab.unpin(holder, lease)
        self.pins = {
            pin: end for pin, end in self.pins.items() if pin[1] != holder or lease not in (None, pin[0])
        }
        if lease is None:
            assert not self.slab.holds_pins(holder)

    @rule(index=st.integers(0, 50))
    def end(self, index: int) -> None:
        lease = self.lease(index)
        assert self.slab.end(lease) == (lease in self.ends)
        self.ends.pop(lease, None)

    @rule(passed_s=st.integers(0, 15))
    def expire(self, passed_s: int) -> None:
        self.now += passed_s
        ended = [lease for lease, end in self.ends.items() if end <= self.now]
        assert sorted(self.slab.expire(self.now)) == sorted(ended)
        for lease in ended:
            del self.ends[lease]
        self.pins = {pin: end for pin, end in self.pins.items() if end > self.now}

    @invariant()
    def adds_up(self) -> None:
        self.slab.check_integrity()
        used = self.used()
        assert self.slab.leases == len(used)
        assert self.slab.free_bytes == SIZE - sum(extent.size for extent in used.values())

    def teardown(self) -> None:
        self.slab.expire(self.now + 100)
        assert self.slab.free_bytes == SIZE
        assert self.slab.take(SIZE, 0.0) is not None, "one hole is left, not several"


TestLending = Lending.TestCase


@given(st.lists(st.integers(0, 5 * UNIT), max_size=30), st.randoms(use_true_random=False))
def test_fragments_join_in_any_order(sizes: list[int], random: object) -> None:
    slab = Slab(SIZE)
    leases = [extent.lease for size in sizes if (extent := slab.take(size, 0.0))]
    random.shuffle(leases)  # type: ignore[attr-defined]
    for lease in leases:
        assert slab.end(lease)
        slab.check_integrity()
    assert slab.take(SIZE, 0.0) is not None


def test_a_pinned_extent_outlives_its_lease() -> None:
    slab = Slab(2 * UNIT, lease_s=10.0)
    extent = slab.take(2 * UNIT, 0.0)
    assert extent is not None
    slab.pin(extent.lease, 1, 25.0)
    assert slab.expire(20.0) == [extent.lease]
    assert not slab.is_alive(extent.lease)
    assert slab.take(1, 20.0) is None
    assert slab.expire(25.0) == []
    assert slab.take(2 * UNIT, 25.0) is not None


def test_the_smallest_hole_that_fits_is_used() -> None:
    slab = Slab(8 * UNIT)
    extents = [slab.take(size * UNIT, 0.0) for size in (3, 1, 2, 1)]
    for index in (0, 2):
        assert (extent := extents[index]) is not None
        slab.end(extent.lease)
    small = slab.take(2 * UNIT, 0.0)
    assert small is not None
    assert small.start == 4 * UNIT
    assert slab.take(3 * UNIT, 0.0) is not None


def test_a_lease_may_last_for_ever() -> None:
    slab = Slab(UNIT, lease_s=math.inf)
    extent = slab.take(0, 0.0)
    assert extent is not None
    assert slab.expire(1e12) == []
    assert slab.end(extent.lease)


def test_a_slab_below_one_unit_has_no_room() -> None:
    assert Slab(UNIT - 1).take(0, 0.0) is None
