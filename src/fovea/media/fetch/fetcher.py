"""Downloads one image or video from a client's URL, protected against server-side request forgery.

The main idea: a host name is resolved once, all its addresses are checked, and the connection goes to a
checked address, not to the name. So a name that resolves differently the second time (DNS rebinding) has no
effect. TLS and the Host header still carry the name, so certificates are verified against it. Redirects are
followed here, and each target passes the same checks. The transport is used without an HTTP client around it:
no cookies, no proxies from the environment, no credentials, no state between two downloads. The result tells
on what terms it may be cached (`freshness`); `cache` stores it.

All I/O goes through two parameters that a test can replace: `resolve` and `transport`.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

from fovea.core.errors import Forbidden
from fovea.media.fetch.address import is_public
from fovea.media.fetch.freshness import Terms, read_terms
from fovea.media.fetch.receive import fetch_error, receive
from fovea.media.fetch.url import follow, host_of, parse_remote, port_of
from fovea.media.kind import IMAGE, Kind
from fovea.media.limits import MediaLimits

if TYPE_CHECKING:
    import httpx

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> the host's addresses as text, in order of preference. Raises OSError if there are none."""

_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_MAX_ADDRESSES = 3


def _user_agent() -> str:
    # Not `fovea.__version__`: the package `fovea` imports the engine, which this floor must not import.
    try:
        return f"fovea/{metadata.version('fovea')}"
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "fovea"


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Resolve a host name with the system's resolver.

    It also resolves unusual spellings of IPv4 (2130706433, 0x7f.1), so that their addresses are checked, too.
    """
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The result of a download.

    data: the bytes; None if the host confirmed the bytes that the caller has.
    terms: on which a cache may reuse them; the shortest freshness of all redirects applies.
    """

    data: bytes | None = field(repr=False)
    terms: Terms


class Fetcher:
    """Downloads within `limits`. Use one per process, and close it with `aclose`.

    resolve: resolves host names.
    transport: sends requests; None: an HTTP transport of httpx, created at the first download.
    """

    def __init__(
        self,
        limits: MediaLimits,
        *,
        resolve: Resolve = resolve_host,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._limits = limits
        self._resolve = resolve
        self._transport = transport
        self._user_agent = _user_agent()
        self._slots = asyncio.Semaphore(limits.max_concurrent_fetches)

    def check(self, url: str, kind: Kind = IMAGE) -> httpx.URL:
        """Check the text of a URL; return it without its fragment. Raises Forbidden or InvalidMedia."""
        if not self._limits.allow_remote:
            raise Forbidden(f"remote {kind.noun}s are turned off here", code="url_not_allowed")
        return parse_remote(url, self._limits, kind)

    async def fetch(self, url: str, kind: Kind = IMAGE) -> bytes:
        """Download the bytes behind an http or https URL, within the limits.

        Raises Forbidden (code url_not_allowed) for a URL or host that the limits exclude, InvalidMedia for a
        failed download, and for data that is too large or of a type that is not accepted.
        """
        result = await self.get(url, kind)
        assert result.data is not None  # it is None only for a revalidation
        return result.data

    async def get(self, url: str, kind: Kind = IMAGE, cached: Terms | None = None) -> FetchResult:
        """Download the bytes behind a URL with their terms, or revalidate bytes that the caller has.

        cached: terms of the bytes that the caller has.
        Raises as `fetch` does.
        """
        checked = self.check(url, kind)
        async with self._slots:
            try:
                async with asyncio.timeout(self._limits.fetch_timeout_s):
                    return await self._follow(checked, kind, cached)
            except TimeoutError:
                raise fetch_error(
                    kind, f"the {kind.noun} did not arrive within {self._limits.fetch_timeout_s:g} s"
                ) from None

    async def aclose(self) -> None:
        if self._transport is not None:
            await self._transport.aclose()

    async def _follow(self, url: httpx.URL, kind: Kind, cached: Terms | None) -> FetchResult:
        fresh_s = math.inf
        for _ in range(self._limits.max_redirects + 1):
            # The terms belong to the URL that answered last time: other URLs on the way are not asked to
            # revalidate.
            terms_here = cached if cached is not None and cached.url == str(url) else None
            async with self._get(url, kind, terms_here) as response:
                if terms_here is not None and response.status_code == 304:
                    return FetchResult(None, terms_here.renew(response.headers, time.time()).limit(fresh_s))
                terms = read_terms(str(url), response.headers, time.time()).limit(fresh_s)
                if response.status_code not in _REDIRECTS:
                    return FetchResult(await receive(response, kind, self._limits), terms)
                fresh_s = terms.fresh_s
                location = response.headers.get("location")
            if not location:
                raise fetch_error(
                    kind, f"{_host(url)} answered {response.status_code} without a Location header"
                )
            url = follow(url, location, self._limits, kind)
        raise fetch_error(kind, f"the {kind.noun} URL redirects more than {self._limits.max_redirects} times")

    @asynccontextmanager
    async def _get(self, url: httpx.URL, kind: Kind, cached: Terms | None) -> AsyncIterator[httpx.Response]:
        """Yield a response before its body arrives. Connection and protocol errors become InvalidMedia."""
        import httpx

        addresses = await self._checked_addresses(url, kind)
        try:
            response = await self._connect(url, addresses, kind, cached)
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.TimeoutException:
            raise fetch_error(kind, f"{_host(url)} did not answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # Only the error's class: its text may contain the address of the connection.
            raise fetch_error(
                kind, f"the transfer from {_host(url)} failed ({type(error).__name__})"
            ) from None

    async def _checked_addresses(self, url: httpx.URL, kind: Kind) -> Sequence[str]:
        try:
            addresses = await self._resolve(host_of(url), port_of(url))
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

        transport = self._open_transport()
        for address in addresses[:-1]:
            with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return await transport.handle_async_request(self._request(url, address, kind, cached))
        return await transport.handle_async_request(self._request(url, addresses[-1], kind, cached))

    def _open_transport(self) -> httpx.AsyncBaseTransport:
        if self._transport is None:
            import httpx

            # No idle connections: the pool stores them by address. A connection whose certificate was
            # verified for one name would be reused, unverified, for another name at the same address.
            self._transport = httpx.AsyncHTTPTransport(
                trust_env=False, retries=0, limits=httpx.Limits(max_keepalive_connections=0)
            )
        return self._transport

    def _request(self, url: httpx.URL, address: str, kind: Kind, cached: Terms | None) -> httpx.Request:
        import httpx

        timeout_s = self._limits.fetch_timeout_s
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
            extensions={
                "sni_hostname": host_of(url),
                "timeout": {
                    "connect": self._limits.connect_timeout_s,
                    "read": timeout_s,
                    "write": timeout_s,
                    "pool": timeout_s,
                },
            },
        )


def _host(url: httpx.URL) -> str:
    return f"the host {host_of(url)[:100]!r}"
