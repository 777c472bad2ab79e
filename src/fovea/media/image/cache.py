"""Cache of decoded images by the identity of their bytes, so that a repeated image is not decoded again.

Every request checks an image's header before it uses this cache. A hit saves only the decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from fovea.core.image import Image
from fovea.media.cache import ByteCache
from fovea.media.flight import SingleFlight

Key = tuple[str, str]
"""Scope, identity."""


class DecodedImageCache:
    """Decodes images and stores their pixels.

    capacity: ceiling in bytes; 0 stores nothing, but simultaneous requests still share one decoding.
    ttl_s: seconds for which an image is stored after it was decoded; 0: no limit.
    """

    def __init__(
        self, capacity: int = 0, ttl_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cache: ByteCache[Key, Image] = ByteCache(capacity, ttl_s, clock)
        self._flights: SingleFlight[Key, Image] = SingleFlight()

    async def get(
        self, identity: str, decode: Callable[[], Coroutine[Any, Any, Image]], scope: str = ""
    ) -> Image:
        """Return the image with that identity, from the cache or from `decode`.

        scope: entries are shared only between requests of one scope.
        """
        key = (scope, identity)
        image = self.cache.find(key)
        self.cache.count(hit=image is not None or key in self._flights)
        if image is not None:
            return image
        return await self._flights.run(key, lambda: self._decode(key, decode))

    def stats(self) -> dict[str, float]:
        return self.cache.stats("decoded_cache")

    async def _decode(self, key: Key, decode: Callable[[], Coroutine[Any, Any, Image]]) -> Image:
        image = await decode()
        self.cache.put(key, image, len(image.rgb) + sum(map(len, key)))
        return image
