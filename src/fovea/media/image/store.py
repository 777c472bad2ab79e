"""Store of uploaded images by id: a later request can name an image instead of sending its bytes again.

It holds decoded images within a ceiling in bytes, evicts the least recently used, and drops each after its
time to live. Ids cannot be guessed. If tenants are separated, an id of one tenant is useless to another.
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
    """An uploaded image.

    expires: seconds on the store's clock; by default of the epoch.
    tenant: only its requests may use the image.
    """

    id: str
    image: Image
    expires: float
    tenant: str = ""


class ImageStore:
    """Stores uploaded images. Not thread-safe: use it from one thread, for example the event loop's.

    capacity: ceiling in bytes, for pixels and entries; 0 stores nothing.
    ttl_s: seconds for which an image is stored.
    """

    def __init__(self, capacity: int, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self.cache: ByteCache[str, StoredImage] = ByteCache(capacity, ttl_s, clock)
        self._clock = clock
        self._secret = secrets.token_bytes(32)

    def __len__(self) -> int:
        return len(self.cache)

    def put(self, image: Image, salt: str = "", tenant: str = "") -> StoredImage | None:
        """Store an image, or renew its time to live. Return None if it is larger than the store.

        The id depends on image, salt and tenant only, so that a repeated upload returns the same id.
        """
        owner = f"{len(tenant)}:{tenant}{salt}\x00{image.identity}"
        name = hmac.digest(self._secret, owner.encode(), "sha256").hex()[:40]
        entry = StoredImage(name, image, self._clock() + self.cache.ttl_s, tenant)
        return entry if self.cache.put(name, entry, image.held_bytes) else None

    def get(self, name: str, tenant: str = "") -> StoredImage | None:
        """Return the tenant's image with that id. None if there is none, or it belongs to another tenant."""
        entry = self.cache.find(name)
        if entry is not None and entry.tenant != tenant:
            entry = None
        self.cache.count(hit=entry is not None)
        return entry

    def drop(self, name: str) -> bool:
        """Remove an image. Return whether it was stored."""
        return self.cache.drop(name)

    def clear(self) -> None:
        self.cache.clear()

    def stats(self) -> dict[str, float]:
        return self.cache.stats("image_store")
