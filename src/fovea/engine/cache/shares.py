"""Shares of clients in the engine's caches of images, so that one client cannot evict what others stored.

A request brings its client's share. The client is the first part of the request's cache salt, with which
every key of these caches begins. Requests whose caches are not separated by client bring a share of 1.
"""

from __future__ import annotations


def owner_of_salt(salt: str) -> str:
    """Return the client to whom a cache salt belongs."""
    return salt.partition(":")[0]


def owner_of_key(key: str, _: object = None) -> str:
    """Return the client to whom an entry belongs, by the entry's key."""
    return owner_of_salt(key.partition("\x00")[0])


class CacheShares:
    """The shares of all clients that have less than the whole. Thread-safe."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}

    def note(self, salt: str, share: float) -> None:
        """Remember a client's share. salt: of its request. share: from 0 to 1."""
        owner = owner_of_salt(salt)
        if share < 1:
            self._shares[owner] = share
        else:
            self._shares.pop(owner, None)

    def share_of(self, owner: str) -> float:
        """Return the part of each cache that a client's entries may fill."""
        return self._shares.get(owner, 1.0)
