"""The protocol of accounts: amounts are reserved before a request and settled after it."""

from __future__ import annotations

from typing import Protocol

from fovea.gateway.amounts import Amounts
from fovea.gateway.tenants.account import Counters
from fovea.gateway.tenants.bounds import NO_BOUNDS, Bounds
from fovea.gateway.tenants.limits import TenantLimits


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

    __slots__ = ("amounts", "bounds", "day", "lease", "local", "month", "settled", "tenant")

    def __init__(
        self,
        tenant: str,
        bounds: Bounds,
        amounts: Amounts,
        lease: str,
        day: int = 0,
        month: int = 0,
        local: bool = False,
    ) -> None:
        self.tenant = tenant
        self.bounds = bounds
        self.amounts = amounts
        self.lease = lease
        self.day = day
        self.month = month
        self.local = local
        self.settled = False


FREE = Reservation("", NO_BOUNDS, Amounts(), "")
"""The reservation of every request whose tenant has no limits."""
FREE.settled = True


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
