"""The owners of a ledger's entries: the bytes of each, and the order in which each has used its entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Owners(Generic[K, V]):
    """The entries of every owner. An owner without entries is not remembered.

    owner_of: returns the owner of an entry by its key and value.
    share_of: returns the part of the capacity that an owner's entries may fill, from 0 to 1. It may change.
    """

    def __init__(self, owner_of: Callable[[K, V], str], share_of: Callable[[str], float]) -> None:
        self.owner_of = owner_of
        self.share_of = share_of
        self._sizes: dict[str, OrderedDict[K, int]] = {}
        self._bytes: dict[str, int] = {}

    def bytes_of(self, owner: str) -> int:
        """Bytes of an owner's entries."""
        return self._bytes.get(owner, 0)

    def allowed(self, key: K, value: V, capacity: int) -> int:
        """Bytes that the entries of an entry's owner may have in a ledger of this capacity."""
        return int(self.share_of(self.owner_of(key, value)) * capacity)

    def victims(self, key: K, value: V, capacity: int, is_pinned: Callable[[K], bool]) -> list[K]:
        """Return the entries to remove until the owner of an entry is within its share, the oldest first."""
        owner = self.owner_of(key, value)
        excess = self.bytes_of(owner) - self.allowed(key, value, capacity)
        victims: list[K] = []
        for other, size in self._sizes.get(owner, {}).items() if excess > 0 else ():
            if excess <= 0:
                break
            if not is_pinned(other):
                victims.append(other)
                excess -= size
        return victims

    def add(self, key: K, value: V, size: int) -> None:
        """Add an entry as the most recently used one of its owner."""
        owner = self.owner_of(key, value)
        self._sizes.setdefault(owner, OrderedDict())[key] = size
        self._bytes[owner] = self._bytes.get(owner, 0) + size

    def touch(self, key: K, value: V) -> None:
        """Make an entry the most recently used one of its owner."""
        self._sizes[self.owner_of(key, value)].move_to_end(key)

    def remove(self, key: K, value: V) -> None:
        """Remove an entry."""
        owner = self.owner_of(key, value)
        sizes = self._sizes[owner]
        self._bytes[owner] -= sizes.pop(key)
        if not sizes:
            del self._sizes[owner], self._bytes[owner]
