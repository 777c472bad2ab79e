"""Errors of requests that do not fit into the limits of their tenant: which limit, what is left, how long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fovea.core.errors import InvalidRequest, Overloaded
from fovea.gateway.amounts import Amounts
from fovea.gateway.tenants.account import DAY_US, MINUTE_US, ROUNDING, Counters, start_of_month
from fovea.gateway.tenants.bounds import METRICS, MILLIONTHS, Bounds

RATE_LIMIT = "rate_limit_exceeded"
BUDGET = "budget_exceeded"
NEVER = "key_limit_exceeded"
PLACE_WAIT_S = 1.0
"""Seconds to wait for a request in flight to end. Nobody knows the real time."""
_NOUNS = ("request", "text tokens", "visual tokens", "cost")
_LEAST_WAIT_S = 0.001


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


def check_possible(tenant: str, bounds: Bounds, amounts: Amounts, max_visual_tokens: int = 0) -> None:
    """Raise InvalidRequest if amounts are larger than a limit, so that no waiting would help."""
    if max_visual_tokens and amounts.visual_tokens > max_visual_tokens:
        raise _never(tenant, "max_visual_tokens", 2, amounts.visual_tokens, max_visual_tokens)
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
        f"key {tenant!r} asks for {asked}; {worst.name} is {shown(worst.metric, worst.limit)}, of which "
        f"{shown(worst.metric, max(0, worst.left))} are left; try again in {_duration(worst.wait_s)}"
    )
    smaller_fits = worst.metric > 0 and worst.left >= 1
    return Overloaded(
        message,
        retry_after=worst.wait_s,
        code=worst.code,
        scope="request" if smaller_fits else "engine",
    )


def shortages(bounds: Bounds, amounts: Amounts, counters: Counters) -> Iterator[Shortage]:
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
