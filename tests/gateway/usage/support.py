"""Usage records for tests."""

from __future__ import annotations

from fovea.gateway.usage.log import ServedFrom, UsageRecord
from fovea.gateway.usage.prices import Consumption, Price

NOON = 1_790_000_000 // 86_400 * 86_400 + 43_200
"""Noon of a day in 2026 (UTC), in seconds of the epoch."""


def record(
    tenant: str = "alice",
    model: str = "m",
    *,
    at_s: float = NOON,
    backend: str = "b1",
    served_from: ServedFrom = "backend",
    error: bool = False,
    cost: int = 1000,
    tokens: int = 100,
) -> UsageRecord:
    """A request with one image; three quarters of its prompt are visual, and a tenth of it was cached."""
    used = Consumption(tokens, tokens * 3 // 4, tokens // 10, tokens // 5, 1)
    price = Price(cost, cost // 10, cost // 2, False)
    return UsageRecord(at_s, tenant, model, backend, served_from, error, used, price, 0.25)
