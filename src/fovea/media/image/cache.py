"""Cache of decoded images by content. Threads that need the same image at the same time decode it once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from fovea.core.image import Rgb
from fovea.media.cache import ByteCache

Key = tuple[str, str]
"""Scope and identity of an image."""


class DecodedImageCache:
    """Stores the pixels of decoded images, and shares decoding between threads. Thread-safe.

    capacity: ceiling in bytes; 0 stores nothing, but simultaneous requests still share one decoding.
    ttl_s: seconds for which an image is stored after it was decoded; 0: no limit.
    """

    def __init__(
        self, capacity: int = 0, ttl_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cache: ByteCache[Key, Rgb] = ByteCache(capacity, ttl_s, clock)
        self._decoding: dict[Key, Future[Rgb]] = {}
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

    def _finish(self, key: Key) -> None:
        with self._lock:
            del self._decoding[key]
