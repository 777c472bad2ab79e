"""The knowledge and the changes that one gateway keeps while the store of the accounts fails.

Then it admits its part of each limit: the limit divided by the number of gateways. Its account begins with
its part of what it last saw in the store. So all gateways together do not admit more than what was left, as
far as they had seen it. Changes wait until the store works again, with a bound on their number.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from fovea.gateway.tenants.account import Account, Adjustment, Bounds, Counters, Four, month_of, new_account


class Standby:
    """One tenant as one gateway knows it.

    known: the account in the store, as it was seen last.
    leases: ends of the leases of this gateway that are not settled, in microseconds of the epoch. They are in
        the order of their ends.
    adopted: those of them that were registered again, so that the store knows them.
    bounds: the limits of the latest request.
    """

    __slots__ = ("_gate", "_sharers", "adopted", "bounds", "known", "leases")

    def __init__(self, bounds: Bounds, sharers: int) -> None:
        self.bounds = bounds
        self.known = Counters()
        self.leases: dict[str, int] = {}
        self.adopted: set[str] = set()
        self._sharers = sharers
        self._gate: Account | None = None

    def hold(self, lease: str, ends: int, now: int) -> None:
        """Remember a lease, and forget those that have ended. now: microseconds of the epoch."""
        self.leases[lease] = ends
        self._forget(now)

    def open(self, bounds: Bounds, now: int) -> Account:
        """Return the account of this gateway alone, as it is now. It begins with the outage."""
        part = bounds.divided(self._sharers)
        if self._gate is None:
            self._gate = self._first(bounds, now)
        gate = self._gate
        gate.advance(part, now)
        self._forget(now)
        gate.in_flight = len(self.leases)
        return gate

    def close(self) -> None:
        """Forget the account of this gateway alone: the store works again."""
        self._gate = None

    def settle(self, bounds: Bounds, change: Adjustment) -> bool:
        """End a lease, and correct the account of this gateway alone if there is one.

        Returns whether the lease was there: it had not ended.
        """
        if self.leases.pop(change.lease, None) is None:
            return False
        if self._gate is not None:
            self._gate.adjust(bounds, change)
        return True

    def _first(self, bounds: Bounds, now: int) -> Account:
        """Return an account that has used this gateway's part of what the store said."""
        if not self.known.birth:
            return new_account("", now)
        seen = Account(self.known)
        seen.advance(bounds, now)
        seen.minute = [value / self._sharers for value in seen.minute]
        seen.day_used = [value / self._sharers for value in seen.day_used]
        seen.month_cost /= self._sharers
        return seen

    def _forget(self, now: int) -> None:
        while self.leases:
            first = next(iter(self.leases))
            if self.leases[first] > now:
                return
            del self.leases[first]
            self.adopted.discard(first)


class Carry:
    """The amounts that one gateway admitted for one tenant on one day without the store.

    They are added to the store when it works again.

    bounds: the limits of the tenant.
    """

    __slots__ = ("_account", "_day_used", "_part", "bounds")

    def __init__(self, bounds: Bounds, sharers: int, day: int, now: int) -> None:
        self.bounds = bounds
        self._part = bounds.divided(sharers)
        self._account = new_account("", now)
        self._account.day, self._account.month = day, month_of(day)
        self._day_used = [0.0, 0.0, 0.0, 0.0]

    def add(self, amounts: Four, now: int) -> None:
        """Add amounts; negative ones are given back."""
        account = self._account
        day, month = account.day, account.month
        account.advance(self._part, now)
        account.day, account.month = day, month
        account.adjust(self._part, Adjustment("", amounts, -1, amounts, -1, 0))
        for i in range(4):
            self._day_used[i] += amounts[i]

    def change(self, now: int) -> Adjustment:
        """Return the change of the account in the store. The limits per minute have drained meanwhile."""
        self.add((0, 0, 0, 0), now)
        (a, b, c, d), (e, f, g, h) = self._account.minute, self._day_used
        return Adjustment("", (a, b, c, d), self._account.day, (e, f, g, h), self._account.month, h)


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
