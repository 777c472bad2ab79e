"""The limits of a tenant that amounts are compared with, as plain numbers."""

from __future__ import annotations

from typing import NamedTuple

METRICS = ("requests", "text_tokens", "visual_tokens", "cost")
"""Names of the amounts, in the order of `Amounts`."""
Four = tuple[float, float, float, float]
ZERO: Four = (0, 0, 0, 0)
MILLIONTHS = 1_000_000


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


NO_BOUNDS = Bounds()
