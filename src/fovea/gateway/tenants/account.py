"""The account of one tenant: what it has used of its limits, how amounts are taken, and how they are refused.

Limits per minute are token buckets, told by the amount that is used of them. It drains evenly, at the limit
per minute, down to nothing. So a minute's worth may be taken at once, and settling may leave a debt that
drains first. Budgets count in windows: a UTC day, and a UTC month. A request counts in the windows in which
it was reserved; what settling changes after the end of a window is not counted.

No clock and no I/O: the accounts in memory and in SQLite use this class. `scripts/account.lua` does the
same computations in Redis, in the same order.

A request that does not fit gets an error that names the limit, what is left of it, and how long to wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from fovea.core.errors import InvalidRequest, Overloaded
from fovea.gateway.usage.prices import Amounts

METRICS = ("requests", "text_tokens", "visual_tokens", "cost")
"""Names of the amounts, in the order of `Amounts`."""
Four = tuple[float, float, float, float]
ZERO: Four = (0, 0, 0, 0)
MILLIONTHS = 1_000_000
MINUTE_US = 60_000_000
DAY_US = 86_400_000_000
ROUNDING = 1e-6
"""A bucket that lacks only this much has room: rounding must not refuse what fits exactly."""
RATE_LIMIT = "rate_limit_exceeded"
BUDGET = "budget_exceeded"
NEVER = "key_limit_exceeded"
PLACE_WAIT_S = 1.0
"""Seconds to wait for a request in flight to end. Nobody knows the real time."""
_NOUNS = ("request", "text tokens", "visual tokens", "cost")
_LEAST_WAIT_S = 0.001


class Bounds(NamedTuple):
    """Limits in the units of `Amounts`; 0: no limit.

    minute: limits per minute, in the order of `METRICS`.
    day: budgets of a UTC day, in the order of `METRICS`.
    month_cost: cost of a UTC month, in millionths of the currency.
    in_flight: requests at one time.
    """

    minute: Four = ZERO
    day: Four = ZERO
    month_cost: float = 0
    in_flight: float = 0

    def divided(self, sharers: int) -> Bounds:
        """Return the part of one of `sharers` gateways. It may be smaller than 1."""
        return Bounds(
            tuple(value / sharers for value in self.minute),  # type: ignore[arg-type]
            tuple(value / sharers for value in self.day),  # type: ignore[arg-type]
            self.month_cost / sharers,
            self.in_flight / sharers,
        )


class Counters(NamedTuple):
    """The numbers of an account at one moment.

    birth: names the account since it was created. It changes if a store lost the account.
    at: microseconds of the epoch.
    minute: amounts that are used of the limits per minute, in the order of `METRICS`.
    day: number of the UTC day since the epoch.
    day_used: amounts of that day.
    month: number of the UTC month since the year 0.
    month_cost: cost of that month, in millionths.
    in_flight: requests that are reserved and not settled.
    """

    birth: str = ""
    at: int = 0
    minute: Four = ZERO
    day: int = 0
    day_used: Four = ZERO
    month: int = 0
    month_cost: float = 0
    in_flight: int = 0


class Adjustment(NamedTuple):
    """A change of what was used, to be applied to an account.

    lease: the reservation that ends with it. The change is applied once, while the lease is there.
        "": no reservation ends.
    minute: added to what is used of the limits per minute; may be negative.
    day, day_used: added to the budgets of that day.
    month, month_cost: added to the cost of that month.
    """

    lease: str
    minute: Four
    day: int
    day_used: Four
    month: int
    month_cost: float


class Account:
    """The amounts that one tenant has used.

    The attributes are those of `Counters`; `in_flight` is kept by the store that knows the leases.
    """

    __slots__ = ("at", "birth", "day", "day_used", "in_flight", "minute", "month", "month_cost")

    def __init__(self, counters: Counters) -> None:
        self.birth, self.at, minute, self.day, day_used, self.month, self.month_cost, self.in_flight = (
            counters
        )
        self.minute = list(minute)
        self.day_used = list(day_used)

    def counters(self) -> Counters:
        """Return the numbers now."""
        (a, b, c, d), (e, f, g, h) = self.minute, self.day_used
        return Counters(
            self.birth, self.at, (a, b, c, d), self.day, (e, f, g, h), self.month, self.month_cost,
            self.in_flight,
        )  # fmt: skip

    def advance(self, bounds: Bounds, now: int) -> None:
        """Drain the buckets and begin new windows. now: microseconds of the epoch.

        If the clock was set back by more than a minute, buckets drain from its new time on, and a
        window lasts until the clock is behind it again. Smaller steps back are waited for.
        """
        elapsed = float(now - self.at)  # as in Lua, where every number is a double
        if elapsed <= 0:
            if elapsed < -MINUTE_US:
                self.at = now
            return
        minute = self.minute
        for i, limit in enumerate(bounds.minute):
            if used := minute[i]:
                left = used - elapsed * limit / MINUTE_US if limit else 0
                minute[i] = left if left > 0 else 0
        self.at = now
        day = now // DAY_US
        if day > self.day:
            self.day, self.day_used = day, [0, 0, 0, 0]
            month = month_of(day)
            if month != self.month:
                self.month, self.month_cost = month, 0

    def fits(self, bounds: Bounds, amounts: Amounts) -> bool:
        """Whether all amounts fit into all limits now."""
        return next(shortages(bounds, amounts, self), None) is None

    def take(self, bounds: Bounds, amounts: Amounts) -> None:
        """Add amounts to what is used, and a request in flight."""
        minute, day = self.minute, self.day_used
        for i, amount in enumerate(amounts):
            if amount:
                if bounds.minute[i]:
                    minute[i] += amount
                day[i] += amount
        self.month_cost += amounts[3]
        self.in_flight += 1

    def adjust(self, bounds: Bounds, change: Adjustment) -> None:
        """Apply a change. Nothing becomes less than 0."""
        for i in range(4):
            if bounds.minute[i]:
                self.minute[i] = max(0, self.minute[i] + change.minute[i])
            if change.day == self.day:
                self.day_used[i] = max(0, self.day_used[i] + change.day_used[i])
        if change.month == self.month:
            self.month_cost = max(0, self.month_cost + change.month_cost)

    def restore(self, bounds: Bounds, known: Counters) -> None:
        """Take over what a gateway remembers, if the store has lost the account since.

        Every number becomes the larger one of both, so that no limit becomes wider.
        """
        if known.birth == self.birth or not known.birth:
            return
        remembered = Account(known)
        remembered.advance(bounds, self.at)
        for i in range(4):
            self.minute[i] = max(self.minute[i], remembered.minute[i])
            if remembered.day == self.day:
                self.day_used[i] = max(self.day_used[i], remembered.day_used[i])
        if remembered.month == self.month:
            self.month_cost = max(self.month_cost, remembered.month_cost)


NO_BOUNDS = Bounds()


def new_account(birth: str, now: int) -> Account:
    """Return an account that has used nothing. now: microseconds of the epoch."""
    day = now // DAY_US
    return Account(Counters(birth, now, ZERO, day, ZERO, month_of(day), 0, 0))


def month_of(day: int) -> int:
    """Return the number of the month of a UTC day: 12 times the year, plus 0 for January."""
    date = datetime.fromtimestamp(day * 86400, UTC)
    return date.year * 12 + date.month - 1


def start_of_month(month: int) -> int:
    """Return the microseconds of the epoch at which a month begins."""
    return int(datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp()) * 1_000_000


def difference(lease: str, reserved: Amounts, used: Amounts, day: int, month: int) -> Adjustment:
    """Return the change that replaces reserved amounts by the used ones."""
    change = (used[0] - reserved[0], used[1] - reserved[1], used[2] - reserved[2], used[3] - reserved[3])
    return Adjustment(lease, change, day, change, month, change[3])


class Shortage(NamedTuple):
    """One limit that a request exceeds.

    name: name of the setting.
    metric: index of the amount in `METRICS`.
    amount, limit, left: in the units of `Amounts`; left may be negative.
    wait_s: seconds until the amount fits, if nothing else is taken meanwhile.
    code: code of the error.
    """

    name: str
    metric: int
    amount: float
    limit: float
    left: float
    wait_s: float
    code: str


def check_possible(tenant: str, bounds: Bounds, amounts: Amounts) -> None:
    """Raise InvalidRequest if amounts are larger than a limit, so that no waiting would help."""
    for i, amount in enumerate(amounts):
        if amount:
            if bounds.minute[i] and amount > bounds.minute[i]:
                raise _never(tenant, f"{METRICS[i]}_per_minute", i, amount, bounds.minute[i])
            if bounds.day[i] and amount > bounds.day[i]:
                raise _never(tenant, f"{METRICS[i]}_per_day", i, amount, bounds.day[i])
    if bounds.month_cost and amounts.cost > bounds.month_cost:
        raise _never(tenant, "cost_per_month", 3, amounts.cost, bounds.month_cost)


def refusal(tenant: str, bounds: Bounds, amounts: Amounts, counters: Counters) -> Overloaded:
    """Return the error for amounts that do not fit. It names the limit with the longest wait.

    counters: the account at the moment of the refusal.
    """
    worst = max(shortages(bounds, amounts, counters), key=lambda each: each.wait_s)
    if worst.name == "max_in_flight":
        message = (
            f"key {tenant!r} has {counters.in_flight} requests in flight; accepted: at most "
            f"{worst.limit:g} (max_in_flight)"
        )
        return Overloaded(message, retry_after=worst.wait_s, code=worst.code)
    asked = shown(worst.metric, worst.amount)
    if worst.metric:
        asked = f"{asked} {_NOUNS[worst.metric]}" if worst.metric < 3 else f"a cost of {asked}"
    else:
        asked = "1 request" if worst.amount == 1 else f"{asked} requests"
    message = (
        f"key {tenant!r} asks for {asked}; {worst.name} is {shown(worst.metric, worst.limit)}, and "
        f"{shown(worst.metric, max(0, worst.left))} are left; try again in {_duration(worst.wait_s)}"
    )
    smaller_fits = worst.metric > 0 and worst.left >= 1
    return Overloaded(
        message, retry_after=worst.wait_s, code=worst.code, scope="request" if smaller_fits else "engine"
    )


def shortages(bounds: Bounds, amounts: Amounts, counters: Counters | Account) -> Iterator[Shortage]:
    """Yield the limits that amounts exceed. Yields at least one for amounts that do not fit."""
    midnight = (counters.day + 1) * DAY_US
    for i, amount in enumerate(amounts):
        limit, used = bounds.minute[i], counters.minute[i]
        if limit and amount and used + amount > limit + ROUNDING:
            wait = (used + amount - limit) * (MINUTE_US / 1e6) / limit
            yield _shortage(f"{METRICS[i]}_per_minute", i, amount, limit, used, wait, RATE_LIMIT)
        limit, used = bounds.day[i], counters.day_used[i]
        if limit and amount and used + amount > limit + ROUNDING:
            wait = (midnight - counters.at) / 1e6
            yield _shortage(f"{METRICS[i]}_per_day", i, amount, limit, used, wait, BUDGET)
    limit, used = bounds.month_cost, counters.month_cost
    if limit and amounts.cost and used + amounts.cost > limit + ROUNDING:
        wait = (start_of_month(counters.month + 1) - counters.at) / 1e6
        yield _shortage("cost_per_month", 3, amounts.cost, limit, used, wait, BUDGET)
    if bounds.in_flight and counters.in_flight + 1 > bounds.in_flight:
        used = counters.in_flight
        yield _shortage("max_in_flight", 0, 1, bounds.in_flight, used, PLACE_WAIT_S, RATE_LIMIT)


def shown(metric: int, amount: float) -> str:
    """Write an amount for a message: whole numbers, and costs in the currency."""
    return (
        f"{amount / MILLIONTHS:.6f}".rstrip("0").rstrip(".") if metric == 3 else f"{int(amount + ROUNDING)}"
    )


def _shortage(
    name: str, metric: int, amount: float, limit: float, used: float, wait: float, code: str
) -> Shortage:
    return Shortage(name, metric, amount, limit, limit - used, max(_LEAST_WAIT_S, wait), code)


def _never(tenant: str, name: str, metric: int, amount: float, limit: float) -> InvalidRequest:
    noun = "requests" if not metric else _NOUNS[metric]
    return InvalidRequest(
        f"the request needs {shown(metric, amount)} ({noun}), and key {tenant!r} may use at most "
        f"{shown(metric, limit)} ({name}); it can never be served",
        code=NEVER,
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 3600:.1f} h"
