"""Bookkeeping of one piece of memory that is lent in extents. It holds numbers only, and takes the clock.

An extent is lent under a lease. The lease ends when somebody ends it, or `lease_s` seconds after it began or
was last extended. A holder (a connection) pins an extent while it reads it. An extent is free again when its
lease has ended and no pin is left, so it is never reused under a reader. Pins have an end, too, so that a
reader that stalls keeps nothing for ever.

Free memory is a sorted list of holes without neighbours that touch. An extent takes the smallest hole that
fits. When all leases and pins have ended there is one hole again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

UNIT = 64
"""Regions begin and end at multiples of this: a cache line."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of the slab under a lease.

    start: offset in bytes.
    size: bytes, a multiple of UNIT.
    lease: number of the lease; no number is used twice.
    """

    start: int
    size: int
    lease: int


@dataclass(slots=True)
class _Loan:
    """An extent and its users. ends_at: end of the lease; -inf: it has ended. pins: end by holder."""

    extent: Extent
    ends_at: float
    pins: dict[int, float] = field(default_factory=dict)


class Slab:
    """Regions of a slab of `size` bytes. Not thread-safe. Times are seconds of one clock."""

    def __init__(self, size: int, *, lease_s: float = 30.0, first_lease: int = 1) -> None:
        self.size = size // UNIT * UNIT
        self.lease_s = lease_s
        self._next_lease = first_lease
        self._starts = [0] if self.size else []  # of the holes, ascending; `_ends` has the other end of each
        self._ends = [self.size] if self.size else []
        self._loans: dict[int, _Loan] = {}
        self._next_end = math.inf  # no lease or pin ends before

    def take(self, size: int, now: float) -> Extent | None:
        """Lend an extent of at least `size` bytes, or return None if no hole is large enough."""
        size = max(-(-size // UNIT), 1) * UNIT
        holes = range(len(self._starts))
        hole = min(
            (index for index in holes if self._ends[index] - self._starts[index] >= size),
            key=lambda index: self._ends[index] - self._starts[index],
            default=None,
        )
        if hole is None:
            return None
        extent = Extent(self._starts[hole], size, self._next_lease)
        self._next_lease += 1
        self._starts[hole] += size
        if self._starts[hole] == self._ends[hole]:
            del self._starts[hole], self._ends[hole]
        self._loans[extent.lease] = _Loan(extent, now + self.lease_s)
        self._next_end = min(self._next_end, now + self.lease_s)
        return extent

    def extend(self, lease: int, now: float) -> bool:
        """Let a lease last `lease_s` seconds from now. Returns False if it has ended."""
        if not self.is_alive(lease):
            return False
        self._loans[lease].ends_at = now + self.lease_s
        return True

    def is_alive(self, lease: int) -> bool:
        loan = self._loans.get(lease)
        return loan is not None and loan.ends_at > -math.inf

    def pin(self, lease: int, holder: int, until: float) -> bool:
        """Keep an extent as it is until that time. Returns False if the lease has ended.

        A holder has one pin on an extent; a second call moves its end.
        """
        if not self.is_alive(lease):
            return False
        self._loans[lease].pins[holder] = until
        self._next_end = min(self._next_end, until)
        return True

    def unpin(self, holder: int, lease: int | None = None) -> None:
        """End the pins of a holder on one extent, or on all."""
        loans = list(self._loans.values()) if lease is None else [self._loans.get(lease)]
        for loan in loans:
            if loan is not None and loan.pins.pop(holder, None) is not None:
                self._settle(loan)

    def holds_pins(self, holder: int) -> bool:
        """Tell whether the holder has a pin."""
        return any(holder in loan.pins for loan in self._loans.values())

    def end(self, lease: int) -> bool:
        """End a lease. Returns False if it had ended already."""
        if not self.is_alive(lease):
            return False
        loan = self._loans[lease]
        loan.ends_at = -math.inf
        self._settle(loan)
        return True

    def expire(self, now: float) -> list[int]:
        """End pins and leases whose time is over. Returns the leases."""
        if now < self._next_end:
            return []
        ended = []
        self._next_end = math.inf
        for lease, loan in list(self._loans.items()):
            loan.pins = {holder: until for holder, until in loan.pins.items() if until > now}
            if -math.inf < loan.ends_at <= now:
                loan.ends_at = -math.inf
                ended.append(lease)
            self._settle(loan)
            ends = [loan.ends_at] if loan.ends_at > -math.inf else []
            self._next_end = min([self._next_end, *ends, *loan.pins.values()])
        return ended

    @property
    def leases(self) -> int:
        """Number of extents that are not free."""
        return len(self._loans)

    @property
    def free_bytes(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless extents and holes cover the slab exactly once."""
        parts = sorted(
            [
                (loan.extent.start, loan.extent.start + loan.extent.size, False)
                for loan in self._loans.values()
            ]
            + [(start, end, True) for start, end in zip(self._starts, self._ends, strict=True)]
        )
        at, after_hole = 0, False
        for start, end, is_hole in parts:
            if start != at or end <= start or (is_hole and after_hole):
                raise RuntimeError(f"the slab's extents and holes do not fit together at byte {at}: {parts}")
            at, after_hole = end, is_hole
        if at != self.size:
            raise RuntimeError(f"the slab's extents and holes end at byte {at} of {self.size}")

    def _settle(self, loan: _Loan) -> None:
        """Free the extent if nobody needs it any more, and join the hole with its neighbours."""
        extent = loan.extent
        if loan.pins or loan.ends_at > -math.inf or self._loans.pop(extent.lease, None) is None:
            return
        start, end = extent.start, extent.start + extent.size
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index and self._ends[index - 1] == start:
            self._ends[index - 1] = end
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
