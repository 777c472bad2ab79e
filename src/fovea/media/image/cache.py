"""Decoded images by the identity of their bytes: a picture that is sent again is not decoded again.

An image found here has passed its header's checks in this very request; only the work of decoding is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from fovea.core.image import Image
from fovea.media.cache import ByteCache
from fovea.media.flight import SingleFlight

Name = tuple[str, str]
"""Scope, identity."""


class DecodedImageCache:
    """capacity: bytes of pixels; 0 keeps none, and who asks at one time still shares one decoding.

    ttl_s: seconds for which an image is kept after it was decoded; 0: no limit.
    """

    def __init__(
        self, capacity: int = 0, ttl_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cache: ByteCache[Name, Image] = ByteCache(capacity, ttl_s, clock)
        self._flights: SingleFlight[Name, Image] = SingleFlight()

    async def get(
        self, identity: str, decode: Callable[[], Coroutine[Any, Any, Image]], scope: str = ""
    ) -> Image:
        """The image of that identity, by `decode` if it is not here. scope: only requests of one scope share it."""
        name = (scope, identity)
        found = self.cache.find(name)
        self.cache.count(hit=found is not None or name in self._flights)
        if found is not None:
            return found
        return await self._flights.run(name, lambda: self._decode(name, decode))

    def stats(self) -> dict[str, float]:
        return self.cache.stats("decoded_cache")

    async def _decode(self, name: Name, decode: Callable[[], Coroutine[Any, Any, Image]]) -> Image:
        image = await decode()
        self.cache.put(name, image, len(image.rgb) + sum(map(len, name)))
        return image
