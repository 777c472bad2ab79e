"""Accounts in the memory of one process."""

from __future__ import annotations

import time
from collections.abc import Callable

from fovea.gateway.amounts import Amounts
from fovea.gateway.tenants.account import Account, Counters, difference, new_account
from fovea.gateway.tenants.accounts import FREE, Reservation
from fovea.gateway.tenants.bounds import Bounds
from fovea.gateway.tenants.limits import TenantLimits
from fovea.gateway.tenants.refusal import check_possible, refusal


class MemoryAccounts:
    """Accounts of all tenants of one process.

    lease_s: seconds after which a reservation that was not settled frees its place.
    clock: returns the seconds of the epoch.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.time) -> None:
        self._lease_us = round(lease_s * 1e6)
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._leases: dict[str, dict[str, int]] = {}
        """Ends of leases in microseconds of the epoch, by tenant and lease, in the order of their ends."""
        self._number = 0

    async def reserve(self, tenant: str, limits: TenantLimits, amounts: Amounts) -> Reservation:
        """Take amounts, as `Accounts.reserve` says."""
        bounds = limits.bounds
        if not limits.counted:
            if limits.max_visual_tokens:
                check_possible(tenant, bounds, amounts, limits.max_visual_tokens)
            return FREE
        check_possible(tenant, bounds, amounts, limits.max_visual_tokens)
        account = self._account(tenant, bounds)
        if not account.fits(bounds, amounts):
            raise refusal(tenant, bounds, amounts, account.counters())
        account.take(bounds, amounts)
        self._number += 1
        lease = str(self._number)
        self._leases[tenant][lease] = account.at + self._lease_us
        return Reservation(tenant, bounds, amounts, lease, account.day, account.month)

    async def settle(self, reservation: Reservation, used: Amounts) -> None:
        """Replace the reserved amounts by the used ones, once."""
        if reservation.settled:
            return
        reservation.settled = True
        account = self._account(reservation.tenant, reservation.bounds)
        if self._leases[reservation.tenant].pop(reservation.lease, None) is None:
            return
        account.in_flight -= 1
        change = difference(reservation.lease, reservation.amounts, used, reservation.day, reservation.month)
        account.adjust(reservation.bounds, change)

    async def usage(self, tenant: str, limits: TenantLimits) -> Counters:
        """Return what a tenant has used."""
        if not limits.counted or tenant not in self._accounts:
            return Counters()
        return self._account(tenant, limits.bounds).counters()

    def stats(self) -> dict[str, float]:
        """Figures as in `Accounts.stats`. Memory does not fail."""
        return {"failures": 0, "fallbacks": 0, "pending": 0, "dropped": 0, "failing": 0}

    async def aclose(self) -> None:
        """Forget all accounts."""
        self._accounts.clear()
        self._leases.clear()

    def _account(self, tenant: str, bounds: Bounds) -> Account:
        """Return the account of a tenant as it is now, without leases that have ended."""
        now = int(self._clock() * 1e6)
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = new_account(tenant, now)
            self._leases[tenant] = {}
            return account
        account.advance(bounds, now)
        leases = self._leases[tenant]
        while leases:
            first = next(iter(leases))
            if leases[first] > account.at:
                break
            del leases[first]
            account.in_flight -= 1
        return account
