"""Resolves host names, and divides threads and slots for downloads fairly among sites.

A thread that waits in the system's resolver cannot be stopped. With a name server that never answers it
returns after half a minute. Therefore the number of threads is bounded, one site gets only a part of them,
and if all threads that a name might use are stuck, its lookup fails at once. A site stands for all host names
below one domain: its owner has as many of them as they like, and would get around limits per host name.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address

from fovea.core.errors import Overloaded

Lookup = Callable[[str], Sequence[str]]
"""host -> its addresses as text. It blocks, and raises OSError if there are none."""
_PARTS = 8
"""One site gets an eighth of the threads."""
_MAX_HOST = 253
_MAX_ADDRESSES = 64
"""Most addresses of a host. Real hosts have a few; each one is checked on the event loop."""
_SHARED_LABELS = frozenset(
    ("ac", "co", "com", "edu", "gob", "gov", "go", "mil", "ne", "net", "nom", "or", "org")
)


def look_up(host: str) -> Sequence[str]:
    """Resolve a host name with the system's resolver. Blocks."""
    return _addresses(host, 0)


@dataclass(eq=False, slots=True)
class _Flight:
    """One lookup in a thread.

    stuck_at: seconds on the loop's clock after which it has taken longer than a caller waits.
    """

    site: str
    done: asyncio.Future[Sequence[str]] = field(repr=False)
    stuck_at: float

    @property
    def stuck(self) -> bool:
        return self.done.get_loop().time() >= self.stuck_at


class Resolver:
    """Resolves host names in at most `most` threads. Use it within one event loop.

    timeout_s: seconds for one lookup, including the wait for a thread.
    look_up: replaces the system's resolver in tests.
    """

    def __init__(self, timeout_s: float, most: int, look_up: Lookup = look_up) -> None:
        self._timeout_s = timeout_s
        self._most = most
        self._per_site = max(1, most // _PARTS)
        self._look_up = look_up
        self._slots = Slots(most, self._per_site)
        self._flights: dict[str, _Flight] = {}

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return the host's addresses as text, in order of preference.

        Unusual spellings of IPv4 (2130706433, 0x7f.1) are resolved, too, so that their addresses are checked.
        Raises OSError if there are none, TimeoutError if they are not known in time, and Overloaded if all
        threads wait for name servers that do not answer.
        """
        if len(host) > _MAX_HOST:
            raise OSError(f"the host name has {len(host)} characters; accepted: at most {_MAX_HOST}")
        with suppress(OSError):
            return _addresses(host, socket.AI_NUMERICHOST)  # needs no name server
        async with asyncio.timeout(self._timeout_s):
            flight = await self._flight(host)
            addresses = await asyncio.shield(flight.done)
        if len(addresses) > _MAX_ADDRESSES:
            raise OSError(f"the host has {len(addresses)} addresses; accepted: at most {_MAX_ADDRESSES}")
        return addresses

    async def _flight(self, host: str) -> _Flight:
        """Return the lookup of this name that is running; if there is none, start one."""
        site = site_of(host)
        if self._flights.get(host) is None:
            self._check_stuck(site)
            await self._slots.acquire(site)
            if host in self._flights:  # someone else started it meanwhile
                self._slots.release(site)
            else:
                self._start(host, site)
        flight = self._flights[host]
        if flight.stuck:
            raise TimeoutError
        return flight

    def _check_stuck(self, site: str) -> None:
        stuck = [flight.site for flight in self._flights.values() if flight.stuck]
        if len(stuck) >= self._most:
            raise Overloaded(
                f"all {self._most} lookups of host names wait for name servers that do not answer; try again",
                retry_after=5.0,
                code="lookups_full",
                scope="request",
            )
        if stuck.count(site) >= self._per_site:
            raise TimeoutError

    def _start(self, host: str, site: str) -> None:
        loop = asyncio.get_running_loop()
        flight = _Flight(site, loop.create_future(), loop.time() + self._timeout_s)

        def run() -> None:
            addresses: Sequence[str] = ()
            error: OSError | None = None
            try:
                addresses = self._look_up(host)
            except (OSError, UnicodeError) as failure:
                error = failure if isinstance(failure, OSError) else OSError(str(failure))
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._finish, host, flight, addresses, error)

        # Daemon threads: one that is stuck does not delay the end of the process.
        try:
            threading.Thread(target=run, name="fovea-resolve", daemon=True).start()
        except RuntimeError:  # the process has no more threads
            self._slots.release(site)
            raise OSError("no thread for a lookup") from None
        self._flights[host] = flight

    def _finish(self, host: str, flight: _Flight, addresses: Sequence[str], error: OSError | None) -> None:
        del self._flights[host]
        if error is None:
            flight.done.set_result(addresses)
        else:
            flight.done.set_exception(error)
            flight.done.exception()  # marks it as retrieved: perhaps nobody waits any more
        self._slots.release(flight.site)


def _addresses(host: str, flags: int) -> Sequence[str]:
    # Bytes, because text would be encoded by Python's old IDNA codec. The host is ASCII already.
    entries = socket.getaddrinfo(host.encode("ascii"), None, type=socket.SOCK_STREAM, flags=flags)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def site_of(host: str) -> str:
    """Return the site of a host: its registered domain, as far as the name alone tells it, or its address.

    host: an ASCII host name, or an address in any spelling. IPv6 addresses count by their network of 64 bits,
        which belongs to one owner.

    Without a list of public suffixes this is an estimate. It joins some owners (all of one hosting company's
    customers), who then share one limit. It separates no owner's names, except below domains like co.uk.
    """
    name = host.lower().rstrip(".")
    labels = name.split(".")
    try:
        if ":" not in name and labels[-1][:1].isdigit():
            return socket.inet_ntoa(socket.inet_aton(name))  # also reads 0x7f.1 and 2130706433
        address = ip_address(name)
    except (OSError, ValueError):
        shared = len(labels[-1]) == 2 and len(labels) > 2 and labels[-2] in _SHARED_LABELS
        return ".".join(labels[-3:] if shared else labels[-2:])
    if isinstance(address, IPv6Address):
        return str(IPv6Address(int(address) >> 64 << 64))
    return str(address)


class Slots:
    """Grants at most `total` slots at a time, at most `per_site` of them to one site.

    A free slot goes to the waiting site that has the fewest, and within a site to whoever waits longest. So a
    site whose work takes long delays itself more than others. Use it within one event loop.
    """

    def __init__(self, total: int, per_site: int) -> None:
        self.free = total
        self._per_site = per_site
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def hold(self, site: str) -> AsyncIterator[None]:
        """Wait for a slot and keep it until the end of the `async with` block."""
        await self.acquire(site)
        try:
            yield
        finally:
            self.release(site)

    async def acquire(self, site: str) -> None:
        """Wait for a slot. Each call needs a `release` later."""
        # While a slot is free, nobody waits for it: `release` has granted whatever may be granted.
        if self.free and self._taken[site] < self._per_site:
            self._take(site)
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(site, deque()).append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.cancelled():
                self._leave(site, slot)
            else:  # it was granted in the same moment
                self.release(site)
            raise

    def release(self, site: str) -> None:
        """Give a slot back, and grant it to the next one who waits."""
        self._taken[site] -= 1
        if not self._taken[site]:
            del self._taken[site]
        self.free += 1
        while self.free and (next_site := self._next_site()) is not None:
            # A site that got a slot goes to the end, so that sites with equally many slots alternate.
            queue = self._waiting.pop(next_site)
            slot = queue.popleft()
            if queue:
                self._waiting[next_site] = queue
            if not slot.done():  # it is done if its task is being cancelled
                self._take(next_site)
                slot.set_result(None)

    def _take(self, site: str) -> None:
        self._taken[site] += 1
        self.free -= 1

    def _leave(self, site: str, slot: asyncio.Future[None]) -> None:
        queue = self._waiting.get(site)
        if queue is not None and slot in queue:
            queue.remove(slot)
            if not queue:
                del self._waiting[site]

    def _next_site(self) -> str | None:
        waiting = (site for site in self._waiting if self._taken[site] < self._per_site)
        return min(waiting, key=self._taken.__getitem__, default=None)
