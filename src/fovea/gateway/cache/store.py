"""The protocol of stores of answers, and the form of their keys."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol


def store_key(scope: str, key: str) -> str:
    """Return the key of an answer in a store: 16 hex digits for its scope, a colon, and the request's key.

    The digits let `clear` find all answers of a scope, and do not tell its name.
    """
    return f"{scope_tag(scope)}:{key}"


def scope_tag(scope: str) -> str:
    """Return 16 hex digits for a scope."""
    return hashlib.sha256(scope.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class ResponseStore(Protocol):
    """Bytes by key, each for a limited time. A store that fails behaves as an empty one and counts it."""

    async def get(self, key: str, *, owner: str = "") -> bytes | None:
        """Return the bytes of a key, or None if there are none.

        owner: tenant who reads them. A copy that the store makes counts as the tenant's.
        """
        ...

    async def put(self, key: str, value: bytes, ttl_s: float, *, owner: str = "") -> bool:
        """Store bytes for so many seconds. Returns whether they were stored.

        owner: tenant whose share of the store they fill.
        """
        ...

    async def drop(self, key: str) -> None:
        """Remove a key, if it is there."""
        ...

    async def clear(self, scope: str | None = None) -> int:
        """Remove the answers of a scope; None: of all scopes. Returns how many were removed."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return the store's counts and sizes by name."""
        ...

    async def aclose(self) -> None:
        """Close connections. The store is not used afterwards."""
        ...
