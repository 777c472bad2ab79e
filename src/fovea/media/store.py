"""Images that clients sent ahead, by id: a later request names one instead of sending its bytes again.

Decoded images, bounded in bytes; the least recently used goes first, and each after its time to live. Ids can not be
guessed: whoever knows one was told it.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from fovea.core.image import Image

SCHEME = "fovea-image://"


@dataclass(frozen=True, slots=True)
class StoredImage:
    """expires: on the store's clock, seconds; by default of the epoch."""

    id: str
    image: Image
    expires: float


class ImageStore:
    """For one thread, as the event loop is. capacity: bytes of pixels; 0 keeps nothing."""

    def __init__(self, capacity: int, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self.capacity = capacity
        self.ttl_s = ttl_s
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._images: OrderedDict[str, StoredImage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._images)

    def put(self, image: Image, owner: str = "") -> StoredImage | None:
        """Keep an image, or keep it longer. One image of one owner has one id. None: it is larger than the store."""
        if len(image.rgb) > self.capacity:
            return None
        name = hmac.digest(self._secret, f"{owner}\x00{image.identity}".encode(), "sha256").hex()[:40]
        self.drop(name)
        stored = StoredImage(name, image, self._clock() + self.ttl_s)
        self._images[name] = stored
        self.bytes += len(image.rgb)
        self._drop_expired()
        while self.bytes > self.capacity:
            self.drop(next(iter(self._images)))
            self.evictions += 1
        return stored

    def get(self, name: str) -> StoredImage | None:
        stored = self._images.get(name)
        if stored is not None and stored.expires <= self._clock():
            self.drop(name)
            stored = None
        if stored is None:
            self.misses += 1
            return None
        self.hits += 1
        self._images.move_to_end(name)
        return stored

    def drop(self, name: str) -> bool:
        """Whether it was here."""
        stored = self._images.pop(name, None)
        if stored is not None:
            self.bytes -= len(stored.image.rgb)
        return stored is not None

    def _drop_expired(self) -> None:
        now = self._clock()
        for name in [name for name, stored in self._images.items() if stored.expires <= now]:
            self.drop(name)

    def clear(self) -> None:
        self._images.clear()
        self.bytes = 0

    def stats(self) -> dict[str, float]:
        self._drop_expired()
        return {
            "image_store_bytes": self.bytes,
            "image_store_entries": len(self),
            "image_store_hits": self.hits,
            "image_store_misses": self.misses,
            "image_store_evictions": self.evictions,
        }
