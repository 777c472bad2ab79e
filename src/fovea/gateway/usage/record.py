"""Usage of requests, and their sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from fovea.gateway.amounts import Consumption
from fovea.gateway.usage.prices import Price

ServedFrom = Literal["backend", "response_cache", "fallback"]
SERVED_FROM: tuple[ServedFrom, ...] = ("backend", "response_cache", "fallback")
OTHER = "(other)"
"""Stands for tenants, models and backends that were too many to be counted apart."""
LONGEST_NAME = 200
MOST_COUNT = 10**12
"""Most tokens, or millionths, of one request that are believed. Sums of more could exceed 64 bits."""


class UsageRecord(NamedTuple):
    """The usage of one request.

    at_s: time of its end, in seconds of the epoch.
    model: the model that answered.
    backend: name of the backend that answered; empty: none did.
    served_from: backend: the first choice answered, or none did; fallback: another backend or model answered.
    error: whether the client got an error.
    seconds: from its arrival to its end.
    """

    at_s: float
    tenant: str
    model: str
    backend: str
    served_from: ServedFrom
    error: bool
    consumption: Consumption
    price: Price
    seconds: float


class Key(NamedTuple):
    """The requests that are summed in one row. hour: hours since the epoch."""

    hour: int
    tenant: str
    model: str
    backend: str
    served_from: str


SUMS = (
    "requests", "errors", "estimated", "images", "prompt_tokens", "visual_tokens", "cached_tokens",
    "completion_tokens", "cost", "credit", "visual_cost", "seconds",
)  # fmt: skip
"""Names of the sums of a row. cost, credit, visual_cost: millionths of the currency. seconds: a float."""


def key_of(record: UsageRecord) -> Key:
    """Return the row to which a request belongs. Long names are cut."""
    return Key(
        int(record.at_s // 3600),
        record.tenant[:LONGEST_NAME],
        record.model[:LONGEST_NAME],
        record.backend[:LONGEST_NAME],
        record.served_from,
    )


def sums_of(record: UsageRecord) -> list[float]:
    """Return what a request adds to the sums of its row, in the order of SUMS.

    A request with a count above MOST_COUNT, which a broken backend may report, is counted as estimated, and
    without tokens and costs.
    """
    if max(*record.consumption, *record.price) > MOST_COUNT:
        nothing = Consumption(images=record.consumption.images, estimated=True)
        return sums_of(record._replace(consumption=nothing, price=Price(0, estimated=True)))
    prompt, visual, cached, completion, images, _ = record.consumption
    cost, credit, visual_cost, estimated = record.price
    return [
        1, int(record.error), int(estimated), images, prompt, visual, cached, completion,
        cost, credit, visual_cost, record.seconds,
    ]  # fmt: skip


class Batch:
    """Sums of requests by row, with a bound on the number of rows.

    most: most rows. Beyond it, requests are summed under the name OTHER. No request is lost.
    """

    __slots__ = ("rows", "_most")

    def __init__(self, most: int) -> None:
        self.rows: dict[Key, list[float]] = {}
        self._most = most

    def add(self, key: Key, sums: Sequence[float]) -> None:
        """Add the sums of one or several requests."""
        row = self.rows.get(key)
        if row is None and len(self.rows) >= self._most:
            key = Key(key.hour, OTHER, OTHER, OTHER, key.served_from)
            row = self.rows.get(key)
        if row is None:
            self.rows[key] = list(sums)
            return
        for place, value in enumerate(sums):
            row[place] += value

    def merge(self, other: Batch) -> None:
        """Add all rows of another batch."""
        for key, sums in other.rows.items():
            self.add(key, sums)
