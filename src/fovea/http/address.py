"""Addresses of clients: which connections are counted together, and which proxies are trusted."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PREFIX = 64
"""Bits of an IPv6 address that name its network. A host gets a whole /64, so it can use any address in it."""
HOPS = 16
"""Addresses of X-Forwarded-For that are read, from its end. A client can send thousands."""
LONGEST = 64
"""Characters of an address. A longer text is none, and costs time to parse."""


def client_key(host: str) -> str:
    """Return the name under which the connections of an address are counted.

    An IPv4 address is its own name, also when it arrives as ::ffff:1.2.3.4. An IPv6 address counts as its /64
    network.
    """
    if ":" not in host:
        return host
    address = as_address(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, PREFIX), strict=False))
    return host if address is None else str(address)


class Proxies:
    """The proxies whose X-Forwarded-For is believed.

    names: addresses and networks, such as 10.0.0.7 and 10.0.0.0/8.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._networks: tuple[Network, ...] = tuple(
            ipaddress.ip_network(name, strict=False) for name in names
        )

    def __contains__(self, host: str) -> bool:
        if not self._networks:
            return False
        address = as_address(host)
        return address is not None and any(address in network for network in self._networks)

    def client(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Return the last address in X-Forwarded-For that is not a trusted proxy; None if all are.

        Everything to the left of it was written by the client itself, so it is not believed.
        """
        values = [value.decode("latin-1") for name, value in headers if name == b"x-forwarded-for"]
        for host in reversed(",".join(values).rsplit(",", HOPS)[-HOPS:]):
            address = as_address(host.strip())
            if address is None:
                return None
            if not any(address in network for network in self._networks):
                return str(address)
        return None


def as_address(host: str) -> Address | None:
    """Return an address without its zone, and as IPv4 if it is one in IPv6's notation; None: no address."""
    if len(host) > LONGEST:
        return None
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
