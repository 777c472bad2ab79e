"""Bytes behind URLs, downloaded once for all who ask at one time and kept on their hosts' own terms.

Policy first, then the cache: a URL that may not be fetched is refused whether or not its bytes are here. A hit that is
fresh makes no connection, so no name is resolved for it; one that is not is asked about by the guarded fetcher, through
every redirect again. An error is never kept, and nothing is used when its host can not be asked.
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

Name = tuple[str, str, str]
"""Scope, noun of the kind, URL without its fragment."""


class Downloads(Protocol):
    """What is asked of `fetch.Fetcher`."""

    def check(self, url: str, kind: Kind = IMAGE) -> object: ...

    async def get(self, url: str, kind: Kind = IMAGE, known: Terms | None = None) -> FetchResult: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Kept:
    """fresh_until: on the cache's clock."""

    data: bytes = field(repr=False)
    terms: Terms
    fresh_until: float


class FetchCache:
    """capacity: bytes; 0 keeps nothing, and who asks at one time still shares one download.

    ttl_s: seconds for which bytes are kept since they were fetched or their host confirmed them.
    """

    def __init__(
        self,
        fetcher: Downloads,
        capacity: int = 0,
        ttl_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache: ByteCache[Name, _Kept] = ByteCache(capacity, ttl_s, clock)
        self.revalidations = 0
        self._fetcher = fetcher
        self._clock = clock
        self._flights: SingleFlight[Name, bytes] = SingleFlight()

    async def fetch(self, url: str, kind: Kind = IMAGE, scope: str = "") -> bytes:
        """The bytes behind a URL. scope: only requests of one scope share them. Raises as `Fetcher.fetch` does."""
        name = self._name(url, kind, scope)
        kept = self.cache.find(name)
        if kept is not None and kept.fresh_until > self._clock():
            self.cache.count(hit=True)
            return kept.data
        if name in self._flights:
            self.cache.count(hit=True)
        return await self._flights.run(name, lambda: self._download(url, kind, name))

    def forget(self, url: str, kind: Kind = IMAGE, scope: str = "") -> None:
        """For bytes that turned out to be no picture: they may be whole the next time."""
        self.cache.drop(self._name(url, kind, scope))

    def stats(self) -> dict[str, float]:
        return self.cache.stats("fetch_cache") | {"fetch_cache_revalidations": self.revalidations}

    async def aclose(self) -> None:
        await self._fetcher.aclose()

    def _name(self, url: str, kind: Kind, scope: str) -> Name:
        return scope, kind.noun, str(self._fetcher.check(url, kind))

    async def _download(self, url: str, kind: Kind, name: Name) -> bytes:
        kept = self.cache.find(name)
        asked = self._clock()  # not when the answer is there: it may have been made at any time in between
        fetched = await self._fetcher.get(url, kind, kept.terms if kept else None)
        terms, data = fetched.terms, fetched.data
        if data is None:
            assert kept is not None  # or nothing could have been confirmed
            data = kept.data
            self.revalidations += 1
        self.cache.count(hit=fetched.data is None)
        if terms.keep:
            size = len(data) + terms.size + sum(map(len, name))
            self.cache.put(name, _Kept(data, terms, asked + terms.fresh_s), size)
        else:
            self.cache.drop(name)
        return data
