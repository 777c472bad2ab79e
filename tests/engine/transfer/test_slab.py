"""The bookkeeping of a slab: regions never overlap, and nothing is lost."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fovea.engine.transfer.slab import UNIT, Region, Slab

SIZE = 64 * UNIT


class Lending(RuleBasedStateMachine):
    """Compares a slab with a list of all leases and pins, and when each ends."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = Slab(SIZE, lease_s=10.0)
        self.now = 0.0
        self.regions: dict[int, Region] = {}
        self.ends: dict[int, float] = {}
        self.pins: dict[tuple[int, int], float] = {}  # end by lease and holder

    def used(self) -> dict[int, Region]:
        pinned = {lease for lease, _ in self.pins}
        return {lease: each for lease, each in self.regions.items() if lease in self.ends or lease in pinned}

    def lease(self, index: int) -> int:
        """A lease that was given once, or one that never was."""
        leases = [*self.regions, 10**6]
        return leases[index % len(leases)]

    @rule(size=st.integers(0, SIZE + UNIT))
    def take(self, size: int) -> None:
        region = self.slab.take(size, self.now)
        if region is None:
            assert size > 0
            return
        assert region.size >= size
        assert region.start % UNIT == region.size % UNIT == 0
        assert region.start + region.size <= SIZE
        for other in self.used().values():
            assert region.start + region.size <= other.start or other.start + other.size <= region.start
        assert region.lease not in self.regions
        self.regions[region.lease] = region
        self.ends[region.lease] = self.now + 10.0

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
        assert self.slab.free_bytes == SIZE - sum(region.size for region in used.values())

    def teardown(self) -> None:
        self.slab.expire(self.now + 100)
        assert self.slab.free_bytes == SIZE
        assert self.slab.take(SIZE, 0.0) is not None, "one hole is left, not several"


TestLending = Lending.TestCase


@given(st.lists(st.integers(0, 5 * UNIT), max_size=30), st.randoms(use_true_random=False))
def test_fragments_join_in_any_order(sizes: list[int], random: object) -> None:
    slab = Slab(SIZE)
    leases = [region.lease for size in sizes if (region := slab.take(size, 0.0))]
    random.shuffle(leases)  # type: ignore[attr-defined]
    for lease in leases:
        assert slab.end(lease)
        slab.check_integrity()
    assert slab.take(SIZE, 0.0) is not None


def test_a_pinned_region_outlives_its_lease() -> None:
    slab = Slab(2 * UNIT, lease_s=10.0)
    region = slab.take(2 * UNIT, 0.0)
    assert region is not None
    slab.pin(region.lease, 1, 25.0)
    assert slab.expire(20.0) == [region.lease]
    assert not slab.is_alive(region.lease)
    assert slab.take(1, 20.0) is None
    assert slab.expire(25.0) == []
    assert slab.take(2 * UNIT, 25.0) is not None


def test_the_smallest_hole_that_fits_is_used() -> None:
    slab = Slab(8 * UNIT)
    regions = [slab.take(size * UNIT, 0.0) for size in (3, 1, 2, 1)]
    for index in (0, 2):
        assert (region := regions[index]) is not None
        slab.end(region.lease)
    small = slab.take(2 * UNIT, 0.0)
    assert small is not None
    assert small.start == 4 * UNIT
    assert slab.take(3 * UNIT, 0.0) is not None


def test_a_lease_may_last_for_ever() -> None:
    slab = Slab(UNIT, lease_s=math.inf)
    region = slab.take(0, 0.0)
    assert region is not None
    assert slab.expire(1e12) == []
    assert slab.end(region.lease)


def test_a_slab_below_one_unit_has_no_room() -> None:
    assert Slab(UNIT - 1).take(0, 0.0) is None
