"""Images that clients sent ahead, by id: a later request names one instead of sending its bytes again.

Decoded images, bounded in bytes; the least recently used goes first, and each after its time to live. Ids can not be
guessed: whoever knows one was told it. Where tenants are kept apart, even that does not help another one.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from fovea.core.image import Image
from fovea.media.cache import ByteCache

SCHEME = "fovea-image://"


@dataclass(frozen=True, slots=True)
class StoredImage:
    """expires: on the store's clock, seconds; by default of the epoch. tenant: who alone may name it."""

    id: str
    image: Image
    expires: float
    tenant: str = ""


class ImageStore:
    """For one thread, as the event loop is. capacity: bytes of pixels and entries; 0 keeps nothing."""

    def __init__(self, capacity: int, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self.cache: ByteCache[str, StoredImage] = ByteCache(capacity, ttl_s, clock)
        self._clock = clock
        self._secret = secrets.token_bytes(32)

    def __len__(self) -> int:
        return len(self.cache)

    def put(self, image: Image, salt: str = "", tenant: str = "") -> StoredImage | None:
        """Keep an image, or keep it longer. One image under one salt of one tenant has one id.

        None: it is larger than the store.
        """
        owner = f"{len(tenant)}:{tenant}{salt}\x00{image.identity}"
        name = hmac.digest(self._secret, owner.encode(), "sha256").hex()[:40]
        stored = StoredImage(name, image, self._clock() + self.cache.ttl_s, tenant)
        return stored if self.cache.put(name, stored, len(image.rgb)) else None

    def get(self, name: str, tenant: str = "") -> StoredImage | None:
        """The tenant's image of that id. Another's is as unknown as one that never was."""
        stored = self.cache.find(name)
        if stored is not None and stored.tenant != tenant:
            stored = None
        self.cache.count(hit=stored is not None)
        return stored

    def drop(self, name: str) -> bool:
        """Whether it was here."""
        return self.cache.drop(name)

    def clear(self) -> None:
        self.cache.clear()

    def stats(self) -> dict[str, float]:
        return self.cache.stats("image_store")
