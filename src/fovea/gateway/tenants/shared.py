"""Accounts in a store that gateways share, and what happens while that store fails.

While the store works, every call goes to it. After some failures in a row no request waits for it any more:
requests are refused, or this gateway admits its part of each limit (`Standby`): the limit divided by the
number of gateways. Its account begins with its part of what it last saw in the store. So all gateways
together do not admit more than what was left, as far as they had seen it.

A task of its own probes the store with growing pauses. When it answers, the task first registers the requests
in flight again, which a store without a disk may have lost, and applies the changes that wait (`Pending`),
whose number is bounded. Then requests use the store again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from fovea.core.errors import InvalidRequest, Unavailable
from fovea.gateway.breaker import Breaker
from fovea.gateway.settings import AccountSettings
from fovea.gateway.tenants.account import (
    DAY_US,
    NO_BOUNDS,
    Account,
    Adjustment,
    Bounds,
    Counters,
    Four,
    check_possible,
    difference,
    month_of,
    new_account,
    refusal,
)
from fovea.gateway.tenants.accounts import FREE, Reservation
from fovea.gateway.tenants.keys import TenantLimits
from fovea.gateway.usage.prices import Amounts

NO_CHANGE = Adjustment("", (0, 0, 0, 0), 0, (0, 0, 0, 0), 0, 0)
"""A change that changes nothing: `adjust` with it returns the account."""
THRESHOLD = 3
"""Failures in a row after which requests no longer try the store."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
QUIET_S = 10.0
"""Seconds between two warnings about single failures."""
log = logging.getLogger("fovea.gateway")
NOTHING = Amounts()
_PROBE = ":probe"
"""Name of the account that probes write to. No tenant with limits has a colon in its name."""
_AT_ONCE = 500
"""Most leases that are registered again in one call."""


class SharedAccounts:
    """Accounts of all tenants in one store.

    store: the store; it is closed with the accounts.
    clock: returns the seconds of the epoch. It is used for the accounts of this gateway alone.
    """

    def __init__(
        self, store: Store, settings: AccountSettings, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._clock = store, clock
        self._local = settings.accounts_on_failure == "local"
        self._sharers = settings.accounts_sharers
        self._lease_us = round(settings.accounts_lease_s * 1e6)
        self._timeout_s = settings.accounts_timeout_s
        self._breaker = Breaker(THRESHOLD, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._failures = 0
        self._pending = Pending(settings.accounts_pending, settings.accounts_sharers)
        self._standbys: dict[str, Standby] = {}
        self._lost: set[str] = set()
        """Tenants whose accounts and leases the store may have lost."""
        self._fallbacks = 0
        self._quiet_until = 0.0
        self._process = secrets.token_hex(6)
        self._numbers = itertools.count(1)
        self._mending: asyncio.Task[None] | None = None

    async def reserve(self, tenant: str, limits: TenantLimits, amounts: Amounts) -> Reservation:
        """Take amounts, as `Accounts.reserve` says."""
        bounds = limits.bounds
        if not limits.counted:
            return FREE
        check_possible(tenant, bounds, amounts)
        lease = f"{self._process}-{next(self._numbers):x}"
        if self._breaker.is_open:
            return self._alone(tenant, bounds, amounts, lease)
        standby = self._standby(tenant, bounds)
        try:
            fits, counters = await self._store.reserve(lease, tenant, bounds, amounts, standby.known)
        except StoreFailed as error:
            self._give_back(tenant, bounds, amounts, lease)
            self._failed(error)
            return self._alone(tenant, bounds, amounts, lease + "x", error)
        except asyncio.CancelledError:
            self._give_back(tenant, bounds, amounts, lease)
            raise
        self._remember(tenant, standby, counters)
        if not fits:
            raise refusal(tenant, bounds, amounts, counters)
        now = self._now()
        standby.hold(lease, now + self._lease_us, now)
        return Reservation(tenant, bounds, amounts, lease, counters.day, counters.month)

    async def settle(self, reservation: Reservation, used: Amounts) -> None:
        """Replace the reserved amounts by the used ones, once. Waits for the store unless it fails."""
        if reservation.settled:
            return
        reservation.settled = True
        tenant, bounds = reservation.tenant, reservation.bounds
        reserved, day, month = reservation.amounts, reservation.day, reservation.month
        standby = self._standby(tenant, bounds)
        change = difference(reservation.lease, reserved, used, day, month)
        held = standby.settle(bounds, change)
        if reservation.local:
            if held:
                self._settle_alone(reservation, change)
            return
        if self._breaker.is_open:
            self._queue(tenant, bounds, change)
            return
        try:
            counters = await self._store.adjust(tenant, bounds, change, standby.known)
        except StoreFailed as error:
            self._queue(tenant, bounds, change)
            self._failed(error)
        except asyncio.CancelledError:
            self._queue(tenant, bounds, change)
            raise
        else:
            self._remember(tenant, standby, counters)

    async def usage(self, tenant: str, limits: TenantLimits) -> Counters:
        """Return what a tenant has used. Raises Unavailable if the store fails."""
        if not limits.counted:
            return Counters()
        if self._breaker.is_open:
            raise _unavailable()
        standby = self._standby(tenant, limits.bounds)
        try:
            counters = await self._store.adjust(tenant, limits.bounds, NO_CHANGE, standby.known)
        except StoreFailed as error:
            self._failed(error)
            raise _unavailable() from error
        self._remember(tenant, standby, counters)
        return counters

    def stats(self) -> dict[str, float]:
        """Figures as in `Accounts.stats`."""
        return {
            "failures": self._failures,
            "fallbacks": self._fallbacks,
            "pending": len(self._pending),
            "dropped": self._pending.dropped,
            "failing": float(self._breaker.is_open),
        }

    async def aclose(self) -> None:
        """Write the changes that wait if the store works, for at most its timeout, and close it."""
        if self._mending is not None:
            self._mending.cancel()
            with suppress(asyncio.CancelledError):
                await self._mending
        if not self._breaker.is_open:
            with suppress(StoreFailed, TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await self._replay()
        await self._store.aclose()

    def _alone(
        self, tenant: str, bounds: Bounds, amounts: Amounts, lease: str, cause: StoreFailed | None = None
    ) -> Reservation:
        """Take amounts of this gateway's part of the limits. Raises Unavailable or Overloaded."""
        self._fallbacks += 1
        if not self._local:
            raise _unavailable() from cause
        now = self._now()
        part = bounds.divided(self._sharers)
        try:
            check_possible(tenant, part, amounts)
        except InvalidRequest as error:
            raise _unavailable(f"; until then this gateway admits its part only: {error.message}") from error
        standby = self._standby(tenant, bounds)
        gate = standby.open(bounds, now)
        if not gate.fits(part, amounts):
            raise refusal(tenant, part, amounts, gate.counters())
        gate.take(part, amounts)
        standby.hold(lease, now + self._lease_us, now)
        self._pending.carry(tenant, bounds, gate.day, amounts, now)
        self._mend()
        return Reservation(tenant, bounds, amounts, lease, gate.day, gate.month, local=True)

    def _settle_alone(self, reservation: Reservation, change: Adjustment) -> None:
        tenant, bounds = reservation.tenant, reservation.bounds
        self._pending.carry(tenant, bounds, reservation.day, change.minute, self._now())
        adopted = self._standbys[tenant].adopted
        if reservation.lease in adopted:
            adopted.discard(reservation.lease)
            self._pending.end(tenant, bounds, NO_CHANGE._replace(lease=reservation.lease))
        self._mend()

    def _standby(self, tenant: str, bounds: Bounds) -> Standby:
        standby = self._standbys.get(tenant)
        if standby is None:
            standby = self._standbys[tenant] = Standby(bounds, self._sharers)
        standby.bounds = bounds
        return standby

    def _remember(self, tenant: str, standby: Standby, counters: Counters) -> None:
        """Note a success, and what the store said."""
        self._succeeded()
        self._learn(tenant, standby, counters)

    def _learn(self, tenant: str, standby: Standby, counters: Counters) -> None:
        if standby.known.birth and counters.birth != standby.known.birth and standby.leases:
            self._lost.add(tenant)  # the store has lost the account, and with it the leases
            self._mend()  # does nothing if this is that task: it looks again
        standby.known = counters

    def _give_back(self, tenant: str, bounds: Bounds, amounts: Amounts, lease: str) -> None:
        """Give back what a call without an answer may have taken."""
        day = self._now() // DAY_US
        self._queue(tenant, bounds, difference(lease, amounts, NOTHING, day, month_of(day)))

    def _queue(self, tenant: str, bounds: Bounds, change: Adjustment) -> None:
        self._pending.end(tenant, bounds, change)
        self._mend()

    def _failed(self, error: StoreFailed) -> None:
        self._failures += 1
        was_open = self._breaker.is_open
        now = self._clock()
        if self._breaker.fail(now) and not was_open:
            log.error("the store of the accounts fails: %s", error)
        elif not was_open and now >= self._quiet_until:  # tenants are not told which store fails, nor why
            self._quiet_until = now + QUIET_S
            log.warning("the store of the accounts has failed once: %s", error)
        self._mend()

    def _succeeded(self) -> None:
        if self._breaker.succeed():
            log.info("the store of the accounts works again")

    def _mend(self) -> None:
        """Start the task that probes the store and applies changes, unless it runs."""
        if self._mending is None or self._mending.done():
            self._mending = asyncio.create_task(self._run_mending())

    async def _run_mending(self) -> None:
        while self._breaker.is_open or self._pending or self._lost:
            await asyncio.sleep(self._breaker.pause_s)
            self._breaker.begin(self._clock())
            try:
                if self._breaker.is_open:
                    await self._store.adjust(_PROBE, NO_BOUNDS, NO_CHANGE, Counters())
                    self._lost.update(
                        name for name, each in self._standbys.items() if each.leases or each.known.birth
                    )
                await self._adopt()
                await self._replay()
            except StoreFailed as error:
                self._failed(error)
            else:
                self._succeeded()
                if not self._pending:  # the store knows now what was admitted without it
                    for standby in self._standbys.values():
                        standby.close()

    async def _adopt(self) -> None:
        """Tell the store what this gateway remembers of accounts, and register their leases again."""
        while self._lost:
            tenant = next(iter(self._lost))
            standby = self._standbys[tenant]
            leases = list(standby.leases)
            for start in range(0, max(1, len(leases)), _AT_ONCE):
                some = leases[start : start + _AT_ONCE]
                standby.adopted.update(some)
                standby.known = await self._store.adopt(tenant, standby.bounds, some, standby.known)
            self._lost.discard(tenant)

    async def _replay(self) -> None:
        """Apply the changes that wait."""
        while (change := self._pending.first(self._now())) is not None:
            try:
                standby = self._standby(change.tenant, change.bounds)
                counters = await self._store.adjust(
                    change.tenant, change.bounds, change.change, standby.known
                )
                self._learn(change.tenant, standby, counters)
            except (StoreFailed, asyncio.CancelledError):
                self._pending.put_back(change, self._now())
                raise

    def _now(self) -> int:
        return int(self._clock() * 1e6)


def _unavailable(more: str = "") -> Unavailable:
    """Return the error for a tenant. It names neither the store nor its failure: those are in the log."""
    return Unavailable(
        f"accounts cannot be read at present, so limits cannot be checked; try again later{more}",
        code="accounts_unavailable",
    )


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


class StoreFailed(Exception):
    """The store gave no answer in time, or an error. The message says which store and why."""


class Store(Protocol):
    """A store of accounts. Each call raises StoreFailed within its timeout if the store fails.

    After StoreFailed, the call may or may not have been carried out.

    known: what the caller remembers of the account. If the store has lost the account since, it takes over
        the larger numbers.
    """

    async def reserve(
        self, lease: str, tenant: str, bounds: Bounds, amounts: Amounts, known: Counters
    ) -> tuple[bool, Counters]:
        """Take all amounts and a place, or nothing. Returns whether they fit, and the account afterwards."""
        ...

    async def adjust(self, tenant: str, bounds: Bounds, change: Adjustment, known: Counters) -> Counters:
        """Apply a change and return the account. Nothing changes if it names a lease that has ended."""
        ...

    async def adopt(self, tenant: str, bounds: Bounds, leases: Sequence[str], known: Counters) -> Counters:
        """Register leases again that the store may have lost, for a whole lease time. There may be none."""
        ...

    async def aclose(self) -> None:
        """Close the store. Never fails."""
        ...


def births() -> Iterator[str]:
    """Yield names for accounts that are created. No other process yields one of them."""
    process, number = secrets.token_hex(8), 0
    while True:
        number += 1
        yield f"{process}-{number}"
