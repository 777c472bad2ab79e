"""Tells whether an IP address belongs to the public internet: the policy against server-side request forgery.

It knows no host names and no URLs. `ipaddress.is_global` covers most addresses. The others are listed here
because Python releases differ (multicast, site-local, 6to4), or because they are public by definition only.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

_NAT64 = ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ip_network("2000::/3")
_NEVER = tuple(
    ip_network(text)
    for text in (
        "100.64.0.0/10",  # carrier-grade NAT; cloud metadata of some providers
        "168.63.129.16/32",  # Azure's host agent answers here from inside every virtual machine
        "192.0.0.0/24",  # IETF protocol assignments
        "192.88.99.0/24",  # 6to4 relays
        "198.18.0.0/15",  # benchmarking
        "2001::/23",  # Teredo, ORCHID and other protocol assignments: they embed other addresses
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: embeds an IPv4 address
        "3fff::/20",  # documentation
    )
)


def is_public(text: str) -> bool:
    """Whether a text is a public unicast address. False for text that is not an IP address."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        inner = _embedded(address)
        if inner is not None:
            return _is_public(inner)
        return address.scope_id is None and address in _GLOBAL_UNICAST and _is_public(address)
    return _is_public(address)


def _embedded(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address to which packets for this IPv6 address go, or None."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    return (
        address.is_global
        and not (address.is_multicast or address.is_reserved or address.is_unspecified)
        and not any(address.version == net.version and address in net for net in _NEVER)
    )
