"""Cache of downloaded bytes by URL, on the terms of their hosts. Simultaneous requests share one download.

The policy is checked before the cache: a URL that may not be fetched is refused even if its bytes are cached.
A fresh hit makes no connection, so its host name is not resolved. A stale entry is revalidated by the
fetcher, which follows and checks every redirect again. Errors are never cached, and a stale entry is not used
if its host is unreachable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from fovea.media.cache import ByteCache
from fovea.media.fetch.fetcher import FetchResult
from fovea.media.fetch.freshness import Terms
from fovea.media.flight import SingleFlight
from fovea.media.kind import IMAGE, Kind

Key = tuple[str, str, str]
"""Scope, noun of the kind, URL without its fragment."""


class Downloader(Protocol):
    """The methods of `fetcher.Fetcher` that the cache uses."""

    def check(self, url: str, kind: Kind = IMAGE) -> object: ...

    async def get(self, url: str, kind: Kind = IMAGE, known: Terms | None = None) -> FetchResult: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _CacheEntry:
    """Downloaded bytes. fresh_until: end of their freshness, seconds on the cache's clock."""

    data: bytes = field(repr=False)
    terms: Terms
    fresh_until: float


class FetchCache:
    """Fetches bytes from URLs and stores them as long as their hosts allow.

    capacity: ceiling in bytes; 0 stores nothing, but simultaneous requests still share one download.
    ttl_s: seconds for which bytes are stored after they were fetched or revalidated; 0: no limit.
    revalidations: number of responses that a host confirmed as unchanged.
    """

    def __init__(
        self,
        fetcher: Downloader,
        capacity: int = 0,
        ttl_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache: ByteCache[Key, _CacheEntry] = ByteCache(capacity, ttl_s, clock)
        self.revalidations = 0
        self._fetcher = fetcher
        self._clock = clock
        self._flights: SingleFlight[Key, bytes] = SingleFlight()

    async def fetch(self, url: str, kind: Kind = IMAGE, scope: str = "") -> bytes:
        """Return the bytes behind a URL, from the cache or from its host.

        scope: entries are shared only between requests of one scope.
        Raises as `Fetcher.fetch` does.
        """
        key = self._key(url, kind, scope)
        entry = self.cache.find(key)
        if entry is not None and entry.fresh_until > self._clock():
            self.cache.count(hit=True)
            return entry.data
        if key in self._flights:
            self.cache.count(hit=True)
        return await self._flights.run(key, lambda: self._download(url, kind, key))

    def forget(self, url: str, kind: Kind = IMAGE, scope: str = "") -> None:
        """Drop the bytes of a URL because they are not valid: the next download may be complete."""
        self.cache.drop(self._key(url, kind, scope))

    def stats(self) -> dict[str, float]:
        return self.cache.stats("fetch_cache") | {"fetch_cache_revalidations": self.revalidations}

    async def aclose(self) -> None:
        await self._fetcher.aclose()

    def _key(self, url: str, kind: Kind, scope: str) -> Key:
        return scope, kind.noun, str(self._fetcher.check(url, kind))

    async def _download(self, url: str, kind: Kind, key: Key) -> bytes:
        entry = self.cache.find(key)
        # Freshness counts from the request: the host may have made the response at any time after it.
        requested_at = self._clock()
        result = await self._fetcher.get(url, kind, entry.terms if entry else None)
        terms, data = result.terms, result.data
        if data is None:
            assert entry is not None  # only an entry can be confirmed
            data = entry.data
            self.revalidations += 1
        self.cache.count(hit=result.data is None)
        if terms.storable:
            size = len(data) + terms.size + sum(map(len, key))
            self.cache.put(key, _CacheEntry(data, terms, requested_at + terms.fresh_s), size)
        else:
            self.cache.drop(key)
        return data
