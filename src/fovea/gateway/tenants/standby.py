"""The knowledge that one gateway has of a tenant's account, and its own account while the store fails.

While the store fails, the gateway admits its part of each limit: the limit divided by the number of gateways.
Its account begins with its part of what it last saw in the store. So all gateways together do not admit more
than what was left, as far as they had seen it.
"""

from __future__ import annotations

from fovea.gateway.tenants.account import (
    Account,
    Adjustment,
    Counters,
    month_of,
    new_account,
)
from fovea.gateway.tenants.bounds import Bounds, Four


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
