"""Downloads one image or video from a stranger's URL without becoming the stranger's hands inside our network.

The governing idea: a name is resolved once, every address it has is checked, and the connection goes to a
checked address, not to the name. So a name that answers differently the second time (DNS rebinding) gains
nothing. TLS and the Host header still carry the name, so certificates are verified against it. Redirects are
followed by hand and each hop passes the same checks. The transport is used without an HTTP client around it:
no cookies, no proxies from the environment, no credentials, nothing that is remembered between two fetches. On what
terms an answer may be kept is told (`freshness`); who keeps it is somebody else (`fetched`).

All I/O crosses two seams that a test can fill: `resolve` and `transport`.
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
from fovea.media.fetch.receive import failed, receive
from fovea.media.fetch.url import follow, host_of, parse_remote, port_of
from fovea.media.kind import IMAGE, Kind
from fovea.media.limits import MediaLimits

if TYPE_CHECKING:
    import httpx

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> its addresses as text, in order of preference. Raises OSError if there are none."""

_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_MAX_ADDRESSES = 3


def _user_agent() -> str:
    # Not `fovea.__version__`: the package's front door knows the engine, which no file here may reach.
    try:
        return f"fovea/{metadata.version('fovea')}"
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "fovea"


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """The system's resolver. It also reads the odd spellings of IPv4 (2130706433, 0x7f.1), so they are checked."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(frozen=True, slots=True)
class FetchResult:
    """data: None if what was known still holds. terms: of keeping it, the shortest of all hops."""

    data: bytes | None = field(repr=False)
    terms: Terms


class Fetcher:
    """Fetches within `limits`. One per process; `aclose` when done."""

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
        """The URL without its fragment. Raises Forbidden or InvalidMedia for what is refused by its text alone."""
        if not self._limits.allow_remote:
            raise Forbidden(f"remote {kind.noun}s are turned off here", code="url_not_allowed")
        return parse_remote(url, self._limits, kind)

    async def fetch(self, url: str, kind: Kind = IMAGE) -> bytes:
        """The bytes behind an http(s) URL: at most the kind's ceiling, of an accepted type and, for images, size.

        Raises Forbidden (code url_not_allowed) for what policy refuses, InvalidMedia for everything that fails.
        """
        fetched = await self.get(url, kind)
        assert fetched.data is not None  # nothing was known that could still hold
        return fetched.data

    async def get(self, url: str, kind: Kind = IMAGE, known: Terms | None = None) -> FetchResult:
        """Bytes with their terms. known: terms of bytes that the caller has, which may turn out to hold still.

        Raises what `fetch` raises.
        """
        checked = self.check(url, kind)
        async with self._slots:
            try:
                async with asyncio.timeout(self._limits.fetch_timeout_s):
                    return await self._follow(checked, kind, known)
            except TimeoutError:
                raise failed(
                    kind, f"the {kind.noun} did not arrive within {self._limits.fetch_timeout_s:g} s"
                ) from None

    async def aclose(self) -> None:
        if self._transport is not None:
            await self._transport.aclose()

    async def _follow(self, url: httpx.URL, kind: Kind, known: Terms | None) -> FetchResult:
        fresh_s = math.inf
        for _ in range(self._limits.max_redirects + 1):
            # What is known is known of the last hop: another one that has these bytes by chance is not asked about them.
            ours = known if known is not None and known.url == str(url) else None
            async with self._get(url, kind, ours) as response:
                if ours is not None and response.status_code == 304:
                    return FetchResult(None, ours.renewed(response.headers, time.time()).within(fresh_s))
                terms = read_terms(str(url), response.headers, time.time()).within(fresh_s)
                if response.status_code not in _REDIRECTS:
                    return FetchResult(await receive(response, kind, self._limits), terms)
                fresh_s = terms.fresh_s
                location = response.headers.get("location")
            if not location:
                raise failed(kind, f"{_host(url)} answered {response.status_code} without saying where to")
            url = follow(url, location, self._limits, kind)
        raise failed(kind, f"the {kind.noun} URL redirects more than {self._limits.max_redirects} times")

    @asynccontextmanager
    async def _get(self, url: httpx.URL, kind: Kind, known: Terms | None) -> AsyncIterator[httpx.Response]:
        """A response whose body is still to come; connection and protocol errors anywhere within are translated."""
        import httpx

        addresses = await self._checked_addresses(url, kind)
        try:
            response = await self._connect(url, addresses, kind, known)
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.TimeoutException:
            raise failed(kind, f"{_host(url)} did not answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # Only the class: the text may hold the address that we connected to.
            raise failed(kind, f"the transfer from {_host(url)} failed ({type(error).__name__})") from None

    async def _checked_addresses(self, url: httpx.URL, kind: Kind) -> Sequence[str]:
        try:
            addresses = await self._resolve(host_of(url), port_of(url))
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise failed(kind, f"{_host(url)} can not be resolved")
        # All, not one: with a public and a private answer the choice would be the attacker's.
        if not self._limits.allow_private_hosts and not all(map(is_public, addresses)):
            raise Forbidden(f"{_host(url)} is not a public host", code="url_not_allowed")
        return addresses[:_MAX_ADDRESSES]

    async def _connect(
        self, url: httpx.URL, addresses: Sequence[str], kind: Kind, known: Terms | None
    ) -> httpx.Response:
        import httpx

        transport = self._open_transport()
        for address in addresses[:-1]:
            with suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return await transport.handle_async_request(self._request(url, address, kind, known))
        return await transport.handle_async_request(self._request(url, addresses[-1], kind, known))

    def _open_transport(self) -> httpx.AsyncBaseTransport:
        if self._transport is None:
            import httpx

            # No idle connections: the pool files them by address, so one that was verified for one name would be
            # used again for another name on the same address, unverified.
            self._transport = httpx.AsyncHTTPTransport(
                trust_env=False, retries=0, limits=httpx.Limits(max_keepalive_connections=0)
            )
        return self._transport

    def _request(self, url: httpx.URL, address: str, kind: Kind, known: Terms | None) -> httpx.Request:
        import httpx

        patience = self._limits.fetch_timeout_s
        return httpx.Request(
            "GET",
            url.copy_with(host=address),
            headers={
                "Host": url.netloc.decode("ascii"),
                "User-Agent": self._user_agent,
                "Accept": kind.accept,
                "Accept-Encoding": "identity",
                "Connection": "close",
                **(known.validators if known else {}),
            },
            extensions={
                "sni_hostname": host_of(url),
                "timeout": {
                    "connect": self._limits.connect_timeout_s,
                    "read": patience,
                    "write": patience,
                    "pool": patience,
                },
            },
        )


def _host(url: httpx.URL) -> str:
    return f"the host {host_of(url)[:100]!r}"
