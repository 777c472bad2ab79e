"""A clock, settings and amounts for the tests of tenants."""

from __future__ import annotations

from typing import Any

from fovea.core.errors import Overloaded
from fovea.gateway.settings import AccountSettings
from fovea.gateway.tenants.accounts import Accounts, Reservation
from fovea.gateway.tenants.keys import TenantLimits
from fovea.gateway.usage.prices import Amounts

MONDAY = 1_767_571_200.0
"""Midnight of 2026-01-05, UTC."""


class Clock:
    """A clock that a test sets. now: seconds of the epoch."""

    def __init__(self, now: float = MONDAY + 36_000) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def settings(accounts: str, **values: Any) -> AccountSettings:
    named = {name if name == "accounts" else f"accounts_{name}": value for name, value in values.items()}
    return AccountSettings(accounts=accounts, **{"accounts_timeout_s": 10.0, **named})


def text(tokens: int) -> Amounts:
    return Amounts(1, tokens)


async def admitted(
    accounts: Accounts, tenant: str, limits: TenantLimits, *amounts: Amounts
) -> list[Reservation]:
    """Reserve one after the other, and return what was admitted."""
    reservations = []
    for each in amounts:
        try:
            reservations.append(await accounts.reserve(tenant, limits, each))
        except Overloaded:
            continue
    return reservations
