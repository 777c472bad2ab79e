"""The policy on remote URLs: the limits on their text, and the addresses that a host may have.

`is_public` is the policy against server-side request forgery. `ipaddress.is_global` covers most addresses.
The others are listed here because Python releases differ (multicast, site-local, 6to4), or because they are
public by definition only. `fetcher` checks the addresses of a host with it before it connects.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING

from fovea.core.errors import Forbidden
from fovea.media.limits import IMAGE, Kind, MediaLimits, quote

if TYPE_CHECKING:
    import httpx

DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_LENGTH = 8192
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


def parse_remote(text: str, limits: MediaLimits, kind: Kind = IMAGE) -> httpx.URL:
    """Parse and check a remote URL; return it without its fragment.

    Raises InvalidMedia for a malformed URL, Forbidden for one that the limits exclude.
    """
    import httpx

    length = _encoded_length(text)
    if length > _MAX_LENGTH:
        raise kind.invalid(
            f"the {kind.noun} URL has {length} characters; accepted: at most {_MAX_LENGTH}, percent-encoded",
            "invalid_{noun}_url",
        )
    # URL parsers disagree about these characters. An attacker could pass a filter with a URL that two parsers
    # read as two different hosts.
    if any(char <= " " or char in "\\\x7f" for char in text):
        raise kind.invalid(
            f"the {kind.noun} URL holds a space, control character or backslash; write it percent-encoded",
            "invalid_{noun}_url",
        )
    try:
        url = httpx.URL(text).copy_with(fragment=None)
    except (httpx.InvalidURL, ValueError, UnicodeError) as error:
        raise kind.invalid(
            f"the {kind.noun} URL is malformed: {quote(str(error))}", "invalid_{noun}_url"
        ) from None
    return check_remote(url, limits, kind)


def follow(url: httpx.URL, location: str, limits: MediaLimits, kind: Kind = IMAGE) -> httpx.URL:
    """Return the checked target of a redirect; `location` may be relative. Raises as `parse_remote` does."""
    import httpx

    if len(location) > _MAX_LENGTH:
        raise kind.invalid(
            f"the {kind.noun} URL redirects to a URL of {len(location)} characters; "
            f"accepted: at most {_MAX_LENGTH}",
            "{noun}_fetch_failed",
        )
    try:
        target = str(url.join(location))
    except (httpx.InvalidURL, ValueError, UnicodeError):
        raise kind.invalid(
            f"the {kind.noun} URL redirects to a malformed URL", "{noun}_fetch_failed"
        ) from None
    next_url = parse_remote(target, limits, kind)
    if url.scheme == "https" and next_url.scheme == "http":
        raise _refusal(f"the {kind.noun} URL redirects from https to http")
    return next_url


def check_remote(url: httpx.URL, limits: MediaLimits, kind: Kind = IMAGE) -> httpx.URL:
    if url.scheme not in DEFAULT_PORTS or url.scheme not in limits.allowed_schemes:
        schemes = ", ".join(scheme for scheme in DEFAULT_PORTS if scheme in limits.allowed_schemes)
        raise _refusal(
            f"the {kind.noun} URL leads to the scheme {url.scheme[:20]!r}; accepted: {schemes or 'none'}"
        )
    if not url.raw_host:
        raise kind.invalid(f"the {kind.noun} URL has no host", "invalid_{noun}_url")
    if not 1 <= port_of(url) <= 65535:
        raise kind.invalid(
            f"the {kind.noun} URL has port {url.port}; accepted: 1 to 65535", "invalid_{noun}_url"
        )
    if url.userinfo:
        raise _refusal(f"the {kind.noun} URL holds a user name or password; accepted: URLs without them")
    if not limits.allow_private_hosts and port_of(url) not in limits.allowed_ports:
        ports = ", ".join(map(str, limits.allowed_ports))
        raise _refusal(f"the {kind.noun} URL has port {url.port}; accepted: {ports or 'none'}")
    if limits.allowed_hosts is not None and not _matches_any(host_of(url), limits.allowed_hosts):
        raise _refusal(
            f"{kind.noun}s from {quote(host_of(url))} are not accepted here; it is not an allowed host"
        )
    return url


def _encoded_length(text: str) -> int:
    """Return the length of a URL once it is percent-encoded. Encoding takes a microsecond per character."""
    if text.isascii():
        return len(text)
    plain = len(text.encode("ascii", "ignore"))
    return plain + 3 * (len(text.encode("utf-8", "surrogatepass")) - plain)


def port_of(url: httpx.URL) -> int:
    return DEFAULT_PORTS[url.scheme] if url.port is None else url.port


def host_of(url: httpx.URL) -> str:
    """Return the host name in ASCII (IDNA 2008).

    `url.host` is Unicode, which resolvers would encode by an older rule.
    """
    return url.raw_host.decode("ascii")


def _matches_any(host: str, patterns: tuple[str, ...]) -> bool:
    name = host.lower().rstrip(".")
    return any(
        name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern for pattern in patterns
    )


def _refusal(message: str) -> Forbidden:
    return Forbidden(message, code="url_not_allowed")


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
