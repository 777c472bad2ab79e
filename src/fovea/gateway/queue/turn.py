"""One request in the fair queue."""

from __future__ import annotations

import asyncio
import enum

MOST_PRIORITY = 1000
"""Priorities are whole numbers from -MOST_PRIORITY to MOST_PRIORITY, as in the API. The lowest goes first."""


class State(enum.Enum):
    """The part of its way through the queue that a request has reached."""

    NEW = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class Turn:
    """A request that waits for its turn, or runs.

    tenant: name of its tenant.
    weight: weight of the tenant, greater than 0. Tenants that wait get shares in proportion to their weights.
    priority: -1000 to 1000; the lowest goes first.
    cost: estimated tokens of text and images, at least 1.
    waiter: the future on which a task waits, if one does.
    """

    __slots__ = ("tenant", "weight", "priority", "cost", "state", "waiter")

    def __init__(self, tenant: str, weight: float, priority: int, cost: int) -> None:
        self.tenant = tenant
        self.weight = weight
        self.priority = priority
        self.cost = cost if cost > 0 else 1
        self.state = State.NEW
        self.waiter: asyncio.Future[None] | None = None
