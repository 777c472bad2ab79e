"""The protocol of a store that several gateways share: every call is one atomic step."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Protocol

from fovea.gateway.amounts import Amounts
from fovea.gateway.tenants.account import Adjustment, Counters
from fovea.gateway.tenants.bounds import Bounds


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


NO_CHANGE = Adjustment("", (0, 0, 0, 0), 0, (0, 0, 0, 0), 0, 0)
"""A change that changes nothing: `adjust` with it returns the account."""


def births() -> Iterator[str]:
    """Yield names for accounts that are created. No other process yields one of them."""
    process, number = secrets.token_hex(8), 0
    while True:
        number += 1
        yield f"{process}-{number}"
