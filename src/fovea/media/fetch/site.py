"""Names the site that a host belongs to, so that one owner's many host names count as one.

Whoever owns a domain has as many host names beneath it as they like. An attacker would get around limits per
host name.
"""

from __future__ import annotations

import socket
from ipaddress import IPv6Address, ip_address

_SHARED_LABELS = frozenset(
    ("ac", "co", "com", "edu", "gob", "gov", "go", "mil", "ne", "net", "nom", "or", "org")
)


def site_of(host: str) -> str:
    """Return the site of a host: its registered domain, as far as the name alone tells it, or its address.

    host: an ASCII host name, or an address in any spelling. IPv6 addresses count by their network of 64 bits,
        which belongs to one owner.

    Without a list of public suffixes this is an estimate. It joins some owners (all of one hosting company's
    customers), who then share one limit. It separates no owner's names, except beneath domains like co.uk.
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
