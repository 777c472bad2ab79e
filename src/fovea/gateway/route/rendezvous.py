"""Weighted rendezvous hashing: every key has its own order of backends, and nothing is remembered.

The score of a backend is -weight / ln(h), where h in (0, 1) is a hash of key and backend. The backend with
the largest score is first. Several gateways and workers agree without talking. If a backend goes, only its
keys move, and they spread over all others. Sources: Thaler and Ravishankar (1998) for rendezvous hashing,
Schindelhauer and Schomaker, "Weighted distributed hash tables" (2005), for the weights.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence

_BITS = 52
"""Bits of a hash that are used: with half a step more, each such number is a float between 0 and 1."""
MOST_ORDERS = 8192


def score(key: str, name: str, weight: float) -> float:
    """The score of a backend for a key; a larger one comes first."""
    data = f"{len(key)}:{key}{name}".encode("utf-8", "surrogatepass")
    hashed = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
    return -weight / math.log(fraction(hashed))


def fraction(hashed: int) -> float:
    """Return a hash of 64 bits as a number that is more than 0 and less than 1."""
    return ((hashed >> (64 - _BITS)) + 0.5) / (1 << _BITS)


def order(key: str, backends: Sequence[tuple[str, float]]) -> tuple[str, ...]:
    """Return the names of backends in the order of a key. backends: (name, weight)."""
    scores = {name: score(key, name, weight) for name, weight in backends}
    return tuple(sorted(scores, key=lambda name: -scores[name]))


class Orders:
    """Orders of recent keys, so that a key that comes again is not hashed again for every backend."""

    def __init__(self, most: int = MOST_ORDERS) -> None:
        self._most = most
        self._version: object = None
        self._orders: OrderedDict[tuple[str, str], tuple[str, ...]] = OrderedDict()

    def order(
        self, model: str, key: str, backends: Sequence[tuple[str, float]], version: object
    ) -> tuple[str, ...]:
        """Return `order` of a key among the backends of a model.

        version: a value that differs if backends or weights do.
        """
        if version != self._version:
            self._orders.clear()
            self._version = version
        found = self._orders.get((model, key))
        if found is None:
            found = self._orders[model, key] = order(key, backends)
            if len(self._orders) > self._most:
                self._orders.popitem(last=False)
        else:
            self._orders.move_to_end((model, key))
        return found
