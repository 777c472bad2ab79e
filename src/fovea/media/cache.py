"""Caches in host memory, bounded in bytes and in age: any bytes, decoded images, uploaded images.

`ByteCache` is the least-recently-used cache below the others; downloads use it, too (`fetch.fetcher`).
`DecodedImageCache` holds decoded images by content, and threads that need the same image at the same time
decode it once. `ImageStore` holds uploaded images by id, so that a later request can name an image instead of
sending its bytes again. Ids cannot be guessed. If tenants are separated, an id of one tenant is useless to
another.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from fovea.core.ledger import Ledger, LedgerStore
from fovea.core.media import Image, Rgb

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 512
"""Estimated bytes of an entry beside its value, so that a million tiny values do not exceed the ceiling."""


class ByteCache(LedgerStore[K, V]):
    """A mapping that evicts its least recently used values if room is short, and drops values that are old.

    Not thread-safe: use it from one thread, for example the event loop's.

    hits, misses: counted by the caller with `count`: only the caller knows whether an entry was usable.
    """

    def __init__(
        self, capacity: int, ttl_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """capacity: ceiling in bytes, each entry with ENTRY_BYTES; 0 stores nothing.

        ttl_s: seconds for which a value is stored after it was put; 0: no limit.
        """
        self.ttl_s = ttl_s
        self.hits = 0
        self.misses = 0
        super().__init__(Ledger(capacity, ttl_s=ttl_s or None, clock=clock))

    def divide(self, owner_of: Callable[[K, V], str], share_of: Callable[[str], float]) -> None:
        """Bound the bytes of every owner's entries. One over its share evicts its own oldest entries first.

        owner_of: returns the owner of an entry by its key and value.
        share_of: returns the part of the capacity that an owner may fill, from 0 to 1.
        """
        self._ledger.divide(owner_of, share_of)

    def put(self, key: K, value: V, size: int) -> bool:
        """Store a value of `size` bytes in place of an older one.

        False: it is larger than the cache, or than its owner's share of it.
        """
        self._ledger.remove(key)
        size += ENTRY_BYTES
        if size > self.capacity or not self._ledger.fits_share(key, value, size):
            return False
        self._ledger.add(key, value, size)
        self._ledger.expire()
        self._ledger.evict_over_share(key)
        self._ledger.evict()
        return True

    def find(self, key: K) -> V | None:
        """Return the value and mark it as the most recently used. None if it is missing or expired."""
        self._ledger.expire()
        value = self._ledger.get(key)
        if value is not None:
            self._ledger.touch(key)
        return value

    def count(self, *, hit: bool) -> None:
        if hit:
            self.hits += 1
        else:
            self.misses += 1

    def drop(self, key: K) -> bool:
        """Remove an entry. Return whether there was one."""
        return self._ledger.remove(key) is not None

    def clear(self) -> None:
        self._ledger.clear()

    def stats(self, prefix: str) -> dict[str, float]:
        """Return the cache's numbers under the names in `observe.table`, which begin with `prefix`."""
        self._ledger.expire()
        figures: dict[str, float] = {
            "bytes": self.bytes, "capacity_bytes": self.capacity, "entries": len(self), "hits": self.hits,
            "misses": self.misses, "evictions": self.evictions, "expired": self.expirations,
        }  # fmt: skip
        return {f"{prefix}_{name}": figure for name, figure in figures.items()}


ImageKey = tuple[str, str]
"""Scope and identity of an image."""


class DecodedImageCache:
    """Stores the pixels of decoded images, and shares decoding between threads. Thread-safe.

    capacity: ceiling in bytes; 0 stores nothing, but simultaneous requests still share one decoding.
    ttl_s: seconds for which an image is stored after it was decoded; 0: no limit.
    """

    def __init__(
        self, capacity: int = 0, ttl_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cache: ByteCache[ImageKey, Rgb] = ByteCache(capacity, ttl_s, clock)
        self._decoding: dict[ImageKey, Future[Rgb]] = {}
        self._lock = threading.Lock()

    def get(self, identity: str, decode: Callable[[], Rgb], scope: str = "") -> Rgb:
        """Return the pixels of the image with that identity, from the cache or from `decode`.

        scope: entries are shared only between requests of one scope.
        Raises the error of `decode`, for everybody who waits for it. An error is not stored.
        """
        key = (scope, identity)
        with self._lock:
            rgb = self.cache.find(key)
            running = self._decoding.get(key)
            self.cache.count(hit=rgb is not None or running is not None)
            if rgb is not None:
                return rgb
            if running is None:
                own = self._decoding[key] = Future()
        if running is not None:
            return running.result()
        try:
            rgb = decode()
        except BaseException as error:
            self._finish(key)
            own.set_exception(error)
            raise
        with self._lock:
            self.cache.put(key, rgb, len(rgb) + sum(map(len, key)))
        self._finish(key)
        own.set_result(rgb)
        return rgb

    def clear(self) -> None:
        """Empty the cache."""
        with self._lock:
            self.cache.clear()

    def stats(self) -> dict[str, float]:
        with self._lock:
            return self.cache.stats("decoded_cache")

    def _finish(self, key: ImageKey) -> None:
        with self._lock:
            del self._decoding[key]


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
