"""Accounts of tenants: amounts are reserved before a request and settled after it.

They are kept in the memory of one process (here), or in a store that gateways share (`shared.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fovea.core.errors import ConfigError
from fovea.core.names import install_command
from fovea.gateway.settings import AccountSettings
from fovea.gateway.tenants.account import (
    NO_BOUNDS,
    Account,
    Bounds,
    Counters,
    check_possible,
    difference,
    new_account,
    refusal,
)
from fovea.gateway.tenants.keys import TenantLimits
from fovea.gateway.usage.prices import Amounts


@dataclass(slots=True)
class Reservation:
    """Amounts that one request has taken of its tenant's limits.

    tenant: name of the tenant.
    bounds: the limits at that time.
    amounts: the amounts that were taken.
    lease: names the reservation in its store; "": nothing was taken.
    day, month: the UTC day and month in which the request counts, numbered as in `Counters`.
    local: whether the store failed, so that this gateway alone knows the reservation.
    settled: whether it was settled.
    """

    tenant: str
    bounds: Bounds
    amounts: Amounts
    lease: str
    day: int = 0
    month: int = 0
    local: bool = False
    settled: bool = False


FREE = Reservation("", NO_BOUNDS, Amounts(), "", settled=True)
"""The reservation of every request whose tenant has no limits."""


class Accounts(Protocol):
    """Accounts of all tenants. For use in one event loop."""

    async def reserve(self, tenant: str, limits: TenantLimits, amounts: Amounts) -> Reservation:
        """Take amounts and a place in flight from all limits of a tenant, or nothing from any.

        Raises Overloaded with the code `rate_limit_exceeded` or `budget_exceeded` if a limit has too little
        left now, InvalidRequest if the amounts are larger than a limit, Unavailable if the store of the
        accounts fails and `accounts_on_failure` is "refuse".
        """
        ...

    async def settle(self, reservation: Reservation, used: Amounts) -> None:
        """Replace the reserved amounts by those that were used, and free the place. Only once counts.

        A reservation that is never settled keeps its amounts, and frees its place after the lease time.
        Never fails: while the store fails, the change waits in this process.
        """
        ...

    async def usage(self, tenant: str, limits: TenantLimits) -> Counters:
        """Return what a tenant has used. A tenant without limits has no account, and its numbers are 0.

        Raises Unavailable if the store fails.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Figures: failures, fallbacks, pending, dropped, failing."""
        ...

    async def aclose(self) -> None:
        """Write what waits, and close the store."""
        ...


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
            return FREE
        check_possible(tenant, bounds, amounts)
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


def open_accounts(settings: AccountSettings, clock: Callable[[], float] | None = None) -> Accounts:
    """Return accounts. Modules of stores that are not used are not imported.

    clock: returns the seconds of the epoch; None: the system's, or that of Redis.
    Raises ConfigError if the store cannot be used. Redis need not run yet.
    """
    kind, lease_s, timeout_s = settings.accounts, settings.accounts_lease_s, settings.accounts_timeout_s
    if kind == "memory":
        return MemoryAccounts(lease_s, clock or time.time)
    from fovea.gateway.tenants.shared import SharedAccounts

    if kind.startswith("sqlite:"):
        from fovea.gateway.tenants.sqlite_store import SqliteStore

        path = Path(kind.removeprefix("sqlite:")).expanduser().absolute()
        store = SqliteStore(path, timeout_s, lease_s, clock or time.time)
        return SharedAccounts(store, settings, clock or time.time)
    try:
        from fovea.gateway.tenants.redis_store import RedisStore
    except ImportError as error:
        raise ConfigError(
            f"accounts in Redis need the package redis; install it with: {install_command('redis')}",
            param="accounts",
        ) from error
    return SharedAccounts(RedisStore(kind, timeout_s, lease_s, clock), settings, clock or time.time)
