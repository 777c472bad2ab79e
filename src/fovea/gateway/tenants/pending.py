"""Changes that wait until a failing store works again, with a bound on their number."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from fovea.gateway.tenants.account import Adjustment
from fovea.gateway.tenants.bounds import Bounds, Four
from fovea.gateway.tenants.standby import Carry


class Change(NamedTuple):
    """A change of one tenant's account."""

    tenant: str
    bounds: Bounds
    change: Adjustment


class Pending:
    """Changes that wait: ends of reservations, and what was admitted without the store.

    What was admitted is added up per tenant and day, so it needs few entries.

    most: most entries. Beyond that the oldest end of a reservation is dropped; its amounts stay reserved.
    dropped: number of entries that were dropped.
    """

    def __init__(self, most: int, sharers: int) -> None:
        self._most, self._sharers = most, sharers
        self._ends: OrderedDict[tuple[str, str], Change] = OrderedDict()
        self._carries: OrderedDict[tuple[str, int], Carry] = OrderedDict()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._ends) + len(self._carries)

    def end(self, tenant: str, bounds: Bounds, change: Adjustment) -> None:
        """Add the end of a reservation."""
        self._ends[tenant, change.lease] = Change(tenant, bounds, change)
        self._shrink()

    def carry(self, tenant: str, bounds: Bounds, day: int, amounts: Four, now: int) -> None:
        """Add amounts that were admitted without the store. now: microseconds of the epoch."""
        carry = self._carries.get((tenant, day))
        if carry is None:
            carry = self._carries[tenant, day] = Carry(bounds, self._sharers, day, now)
        carry.add(amounts, now)
        self._shrink()

    def first(self, now: int) -> Change | None:
        """Remove and return the oldest change. None: there is none."""
        if self._ends:
            return self._ends.popitem(last=False)[1]
        if self._carries:
            (tenant, _), carry = self._carries.popitem(last=False)
            return Change(tenant, carry.bounds, carry.change(now))
        return None

    def put_back(self, change: Change, now: int) -> None:
        """Return a change that the store did not take."""
        if change.change.lease:
            key = (change.tenant, change.change.lease)
            self._ends[key] = change
            self._ends.move_to_end(key, last=False)
            self._shrink()
            return
        used = change.change
        self.carry(change.tenant, change.bounds, used.day, used.day_used, now)

    def _shrink(self) -> None:
        while len(self) > self._most:
            (self._ends or self._carries).popitem(last=False)
            self.dropped += 1
