"""Which remote URLs the policy lets through, by their text alone; addresses are `address` and `fetch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fovea.core.errors import Forbidden, InvalidImage
from fovea.media.limits import MediaLimits

if TYPE_CHECKING:
    import httpx

DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_LENGTH = 8192


def parse_remote(text: str, limits: MediaLimits) -> httpx.URL:
    """The URL without its fragment. Raises InvalidImage if it is none, Forbidden if policy is against it."""
    import httpx

    if len(text) > _MAX_LENGTH:
        raise InvalidImage(
            f"the image URL has {len(text)} characters; accepted: at most {_MAX_LENGTH}",
            code="invalid_image_url",
        )
    # Parsers disagree about these; a URL that means two hosts is how filters are passed.
    if any(char <= " " or char in "\\\x7f" for char in text):
        raise InvalidImage(
            "the image URL holds a space, control character or backslash; write it percent-encoded",
            code="invalid_image_url",
        )
    try:
        url = httpx.URL(text).copy_with(fragment=None)
    except (httpx.InvalidURL, ValueError, UnicodeError) as error:
        raise InvalidImage(f"the image URL is malformed: {error}", code="invalid_image_url") from None
    return check_remote(url, limits)


def follow(url: httpx.URL, location: str, limits: MediaLimits) -> httpx.URL:
    """Where a redirect leads, relative ones included; checked like a client's own URL."""
    import httpx

    try:
        target = str(url.join(location))
    except (httpx.InvalidURL, ValueError, UnicodeError):
        raise InvalidImage("the image URL redirects to a malformed URL", code="image_fetch_failed") from None
    following = parse_remote(target, limits)
    if url.scheme == "https" and following.scheme == "http":
        raise _refused("the image URL redirects from https to http")
    return following


def check_remote(url: httpx.URL, limits: MediaLimits) -> httpx.URL:
    if url.scheme not in DEFAULT_PORTS or url.scheme not in limits.allowed_schemes:
        schemes = ", ".join(scheme for scheme in DEFAULT_PORTS if scheme in limits.allowed_schemes)
        raise _refused(
            f"the image URL leads to the scheme {url.scheme[:20]!r}; accepted: {schemes or 'none'}"
        )
    if not url.raw_host:
        raise InvalidImage("the image URL has no host", code="invalid_image_url")
    if not 1 <= port_of(url) <= 65535:
        raise InvalidImage(
            f"the image URL has port {url.port}; accepted: 1 to 65535", code="invalid_image_url"
        )
    if url.userinfo:
        raise _refused("the image URL holds a user name or password; accepted: URLs without")
    if not limits.allow_private_hosts and port_of(url) not in limits.allowed_ports:
        ports = ", ".join(map(str, limits.allowed_ports))
        raise _refused(f"the image URL has port {url.port}; accepted: {ports or 'none'}")
    if limits.allowed_hosts is not None and not _listed(host_of(url), limits.allowed_hosts):
        raise _refused(f"images from {host_of(url)[:100]!r} are not accepted here; it is not an allowed host")
    return url


def port_of(url: httpx.URL) -> int:
    return DEFAULT_PORTS[url.scheme] if url.port is None else url.port


def host_of(url: httpx.URL) -> str:
    """The name in ASCII (IDNA 2008); `url.host` is Unicode, which resolvers encode by an older rule."""
    return url.raw_host.decode("ascii")


def _listed(host: str, patterns: tuple[str, ...]) -> bool:
    name = host.lower().rstrip(".")
    return any(
        name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern for pattern in patterns
    )


def _refused(message: str) -> Forbidden:
    return Forbidden(message, code="url_not_allowed")
