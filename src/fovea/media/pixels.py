"""Pixels of a client's image, decoded when they are read.

Decoded pixels are ten to a thousand times larger than the file. So a request holds the file, and its pixels
exist only while a worker thread resizes them for the encoder. An image whose encoder output is cached is
never decoded at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fovea.core.errors import InvalidImage
from fovea.core.image import Rgb
from fovea.core.stage import stage
from fovea.media.image.cache import DecodedImageCache
from fovea.media.image.probe import ImageHeader
from fovea.media.sandbox.decoder import MediaDecoder


class EncodedPixels:
    """A file whose header was checked, as a `core.image.PixelSource`.

    seconds: how long the last `read` took.
    """

    def __init__(
        self,
        data: bytes,
        header: ImageHeader,
        identity: str,
        decoder: MediaDecoder,
        cache: DecodedImageCache,
        scope: str = "",
        on_invalid: Callable[[], None] = lambda: None,
    ) -> None:
        """data: the whole file. header, identity: as they were read from it.

        scope: part of the cache that the request may use.
        on_invalid: called, in the thread of `read`, if the file turns out to be damaged.
        """
        self.seconds = 0.0
        self._data = data
        self._header = header
        self._identity = identity
        self._decoder = decoder
        self._cache = cache
        self._scope = scope
        self._on_invalid = on_invalid

    @property
    def size(self) -> int:
        return len(self._data)

    def again(self) -> EncodedPixels:
        """Return a second source of the same file, for another request."""
        return EncodedPixels(
            self._data,
            self._header,
            self._identity,
            self._decoder,
            self._cache,
            self._scope,
            self._on_invalid,
        )

    def read(self) -> Rgb:
        started = time.perf_counter()
        try:
            return self._cache.get(self._identity, self._decode, self._scope)
        except InvalidImage:
            self._on_invalid()
            raise
        finally:
            self.seconds = time.perf_counter() - started

    def _decode(self) -> Rgb:
        with stage("image decode"):
            return self._decoder.decode_image(self._data, self._header, self._scope)
