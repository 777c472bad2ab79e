"""Downloads images and videos from clients' URLs, and caches their bytes on the terms of their hosts.

`Fetcher` is protected against server-side request forgery. The main idea: a host name is resolved once, all
its addresses are checked, and the connection goes to a checked address, not to the name. So a name that
resolves differently the second time (DNS rebinding) has no effect. TLS and the Host header still carry the
name, so certificates are verified against it. Redirects are followed here, and each target passes the same
checks. The transport is used without an HTTP client around it: no cookies, no proxies from the environment,
no credentials, no state between two downloads. No server can take more than a part of the slots, threads,
memory and time of the event loop that downloads share. All I/O goes through two parameters that a test can
replace: `resolve` and `transport`.

`FetchCache` checks the policy before it looks: a URL that may not be fetched is refused even if its bytes are
cached. A fresh hit makes no connection, so its host name is not resolved. A stale entry is revalidated by the
fetcher. Errors are never cached, and a stale entry is not used if its host is unreachable. Simultaneous
requests share one download (`SingleFlight`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fovea.core.errors import Forbidden
from fovea.core.names import DISTRIBUTION
from fovea.media.cache import ByteCache
from fovea.media.fetch.resolve import Resolver, Slots, site_of
from fovea.media.fetch.response import Arrivals, Terms, fetch_error, read_terms, receive
from fovea.media.fetch.url import follow, host_of, is_public, parse_remote, port_of
from fovea.media.limits import IMAGE, MIB, Kind, MediaLimits, quote

if TYPE_CHECKING:
    import httpx

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> the host's addresses as text, in order of preference. Raises OSError if there are none."""
DownloadKey = tuple[str, str, str]
"""Scope, noun of the kind, URL without its fragment."""
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_MAX_ADDRESSES = 3


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The result of a download.

    data: the bytes; None if the host confirmed the bytes that the caller has.
    terms: on which a cache may reuse them; the shortest freshness of all redirects applies.
    """

    data: bytes | None = field(repr=False)
    terms: Terms


@dataclass(frozen=True, slots=True)
class _Redirect:
    """The checked target of a redirect, and the seconds for which the redirect may be reused."""

    url: httpx.URL
    fresh_s: float


class Fetcher:
    """Downloads within `limits`. Use one per process, and close it with `aclose`.

    resolve: resolves host names; None: the system's resolver, in threads of its own.
    transport: sends requests; None: `wire.WireTransport`, created at the first download.
    """

    def __init__(
        self,
        limits: MediaLimits,
        *,
        resolve: Resolve | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._limits = limits
        self._resolve = resolve or Resolver(limits.resolve_timeout_s, limits.max_lookups).resolve
        self._transport = transport
        self._user_agent = _user_agent()
        self.slots = Slots(limits.max_concurrent_fetches, limits.max_fetches_per_host)
        self.arrivals = Arrivals(limits.max_fetching_mib * MIB)

    def check(self, url: str, kind: Kind = IMAGE) -> httpx.URL:
        """Check the text of a URL; return it without its fragment. Raises Forbidden or InvalidMedia."""
        if not self._limits.allow_remote:
            raise Forbidden(f"remote {kind.noun}s are turned off here", code="url_not_allowed")
        return parse_remote(url, self._limits, kind)

    async def fetch(self, url: str, kind: Kind = IMAGE) -> bytes:
        """Download the bytes behind an http or https URL, within the limits.

        Raises Forbidden (code url_not_allowed) for a URL or host that the limits exclude, InvalidMedia for a
        failed download, and for data that is too large or of a type that is not accepted. Raises Overloaded
        if there is no room for the download now.
        """
        result = await self.get(url, kind)
        assert result.data is not None  # it is None only for a revalidation
        return result.data

    async def get(self, url: str, kind: Kind = IMAGE, cached: Terms | None = None) -> FetchResult:
        """Download the bytes behind a URL with their terms, or revalidate bytes that the caller has.

        cached: terms of the bytes that the caller has.
        Raises as `fetch` does.
        """
        target = self.check(url, kind)
        loop = asyncio.get_running_loop()
        left_s, fresh_s = self._limits.fetch_timeout_s, math.inf
        for _ in range(self._limits.max_redirects + 1):
            # Each redirect takes a slot of its own site. Otherwise links on many sites that redirect to one
            # slow server would take all slots. Waiting for a slot is not part of the download's time.
            async with self.slots.hold(site_of(host_of(target))):
                started = loop.time()
                try:
                    async with asyncio.timeout(left_s):
                        outcome = await self._request_once(target, kind, cached)
                except TimeoutError:
                    raise fetch_error(
                        kind, f"the {kind.noun} did not arrive within {self._limits.fetch_timeout_s:g} s"
                    ) from None
                left_s -= loop.time() - started
            if isinstance(outcome, FetchResult):
                return FetchResult(outcome.data, outcome.terms.limit(fresh_s))
            target, fresh_s = outcome.url, min(fresh_s, outcome.fresh_s)
        raise fetch_error(kind, f"the {kind.noun} URL redirects more than {self._limits.max_redirects} times")

    async def aclose(self) -> None:
        if self._transport is not None:
            await self._transport.aclose()

    async def _request_once(
        self, url: httpx.URL, kind: Kind, cached: Terms | None
    ) -> FetchResult | _Redirect:
        # The terms belong to the URL that answered last time: other URLs on the way are not asked to
        # revalidate.
        terms_here = cached if cached is not None and cached.url == str(url) else None
        async with self._get(url, kind, terms_here) as response:
            if terms_here is not None and response.status_code == 304:
                return FetchResult(None, terms_here.renew(response.headers, time.time()))
            terms = read_terms(str(url), response.headers, time.time())
            if response.status_code not in _REDIRECTS:
                return FetchResult(await receive(response, kind, self._limits, self.arrivals), terms)
            location = response.headers.get("location")
        if not location:
            raise fetch_error(kind, f"{_host(url)} answered {response.status_code} without a Location header")
        return _Redirect(follow(url, location, self._limits, kind), terms.fresh_s)

    @asynccontextmanager
    async def _get(self, url: httpx.URL, kind: Kind, cached: Terms | None) -> AsyncIterator[httpx.Response]:
        """Yield a response before its body arrives. Connection and protocol errors become InvalidMedia."""
        import httpx

        from fovea.media.fetch.wire import TransferRefused

        addresses = await self._checked_addresses(url, kind)
        try:
            response = await self._connect(url, addresses, kind, cached)
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.TimeoutException:
            raise fetch_error(kind, f"{_host(url)} did not answer in time") from None
        except TransferRefused as error:
            raise fetch_error(kind, f"{_host(url)} {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # Only the class of other errors: their text may contain the address of the connection.
            raise fetch_error(
                kind, f"the transfer from {_host(url)} failed ({type(error).__name__})"
            ) from None

    async def _checked_addresses(self, url: httpx.URL, kind: Kind) -> Sequence[str]:
        try:
            addresses = await self._resolve(host_of(url), port_of(url))
        except TimeoutError:
            raise fetch_error(
                kind, f"{_host(url)} was not resolved within {self._limits.resolve_timeout_s:g} s"
            ) from None
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise fetch_error(kind, f"{_host(url)} cannot be resolved")
        # All addresses must be public: with a public and a private one, an attacker could choose the private
        # one.
        if not self._limits.allow_private_hosts and not all(map(is_public, addresses)):
            raise Forbidden(f"{_host(url)} is not a public host", code="url_not_allowed")
        return addresses[:_MAX_ADDRESSES]

    async def _connect(
        self, url: httpx.URL, addresses: Sequence[str], kind: Kind, cached: Terms | None
    ) -> httpx.Response:
        import httpx

        from fovea.media.fetch.wire import WireTransport

        if self._transport is None:
            self._transport = WireTransport()
        send = self._transport.handle_async_request
        for address in addresses[:-1]:
            with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return await send(self._request(url, address, kind, cached))
        return await send(self._request(url, addresses[-1], kind, cached))

    def _request(self, url: httpx.URL, address: str, kind: Kind, cached: Terms | None) -> httpx.Request:
        import httpx

        return httpx.Request(
            "GET",
            url.copy_with(host=address),
            headers={
                "Host": url.netloc.decode("ascii"),
                "User-Agent": self._user_agent,
                "Accept": kind.accept,
                "Accept-Encoding": "identity",
                "Connection": "close",
                **(cached.validators if cached else {}),
            },
            extensions={"sni_hostname": host_of(url), "connect_timeout_s": self._limits.connect_timeout_s},
        )


def _host(url: httpx.URL) -> str:
    return f"the host {quote(host_of(url))}"


def _user_agent() -> str:
    # Not `fovea.__version__`: the package `fovea` imports the engine, which this package must not import.
    try:
        return f"fovea/{metadata.version(DISTRIBUTION)}"
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "fovea"


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
        fetcher: Fetcher,
        capacity: int = 0,
        ttl_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache: ByteCache[DownloadKey, _CacheEntry] = ByteCache(capacity, ttl_s, clock)
        self.revalidations = 0
        self._fetcher = fetcher
        self._clock = clock
        self._flights: SingleFlight[DownloadKey, bytes] = SingleFlight()

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

    def _key(self, url: str, kind: Kind, scope: str) -> DownloadKey:
        return scope, kind.noun, str(self._fetcher.check(url, kind))

    async def _download(self, url: str, kind: Kind, key: DownloadKey) -> bytes:
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


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class SingleFlight(Generic[K, T]):
    """Runs one task per key at a time. All callers that wait for it get its result or its error.

    Results are not stored: a call after the task's end starts a new task. Use it within one event loop.
    """

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[T]] = {}

    def __contains__(self, key: K) -> bool:
        """Whether a task for this key is running now."""
        return key in self._flights

    async def run(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the running task for this key; if there is none, start one with `work`.

        Cancelling a caller does not affect the others. The task is cancelled with its last caller.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()))
            flight.task.add_done_callback(lambda task: self._finish(key, task))
        flight.waiting += 1
        try:
            # Unlike awaiting the task, this does not cancel it with the caller.
            await asyncio.wait((flight.task,))
            return flight.task.result()
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                # Remove it now, so that the next caller does not join a task that is being cancelled.
                self._remove(key, flight.task)
                flight.task.cancel()

    def _finish(self, key: K, task: asyncio.Task[T]) -> None:
        self._remove(key, task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; otherwise asyncio logs it if no caller waits any more

    def _remove(self, key: K, task: asyncio.Task[T]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
