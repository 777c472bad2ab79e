"""Refuses what the web pages of other sites make their visitors' browsers send to a server without keys.

A server without keys trusts everyone who reaches its port. Two kinds of pages can abuse that, because their
visitor's browser reaches the port: on the visitor's own machine, or in a private network.

- Any page can send requests to any address. It reads no answer, but the work is done. The browser names the
  page's site in the header Origin, and says in Sec-Fetch-Site that it is another one.
- A page can give its own name the server's address after it was loaded ("DNS rebinding"). To the browser, the
  server is then the page's own site. Only the Host header shows the name, which is none of the server's.

Neither page knows a key, so a server with keys needs none of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fovea.api.errors import clip
from fovea.core.errors import Forbidden
from fovea.http.address import as_address

if TYPE_CHECKING:
    from fovea.http.settings import HttpSettings

ALL = "*"
LONGEST = 100
"""Characters of a header's value in a message."""


def with_own_name(http: HttpSettings, host: str) -> HttpSettings:
    """Return the settings with the name that the server listens on, if it is a name, among its names."""
    if host in ("", "localhost", *http.server_names) or as_address(host) is not None:
        return http
    return replace(http, server_names=(*http.server_names, host.lower()))


class Browsers:
    """The names and sites whose requests a server without keys accepts.

    names: further names of the server, in small letters; *.example.com: all names below example.com; *: all
        names.
    origins: sites whose pages may send requests, such as https://example.org; *: all; None: this server has
        no setting for them.
    """

    def __init__(self, names: Sequence[str], origins: Sequence[str] | None = None) -> None:
        self._names = names
        self._origins = frozenset(origins or ())
        self._own_pages = "of the server's own pages"
        if origins is not None:
            self._own_pages += ", and of the sites in cors_origins"

    def check(self, scope: Mapping[str, Any], *, page: bool = False) -> None:
        """Check the headers of a request.

        scope: its ASGI scope.
        page: whether its path is a page for people, to which pages of other sites may link.
        Raises Forbidden.
        """
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host and not self._is_own(_name_of(host), scope.get("server")):
            raise Forbidden(
                f"the Host header {clip(host, LONGEST)!r} is not a name of this server; accepted without API "
                "keys: IP addresses, localhost, names without a dot (not on the loopback interface), and the "
                "names of --server-names and --host",
                param="host",
                code="host_not_allowed",
            )
        if ALL in self._origins:
            return
        origin = headers.get(b"origin")
        if origin is not None:
            refused = not self._accepts(origin.decode("latin-1").lower(), host)
        else:
            linked = page and scope["method"] in ("GET", "HEAD")
            refused = headers.get(b"sec-fetch-site") == b"cross-site" and not linked
        if refused:
            raise Forbidden(
                f"a web page of another site ({_site(origin)}) has made a browser send this; accepted "
                f"without API keys: requests of programs, {self._own_pages}",
                param="origin",
                code="origin_not_allowed",
            )

    def _is_own(self, name: str, server: tuple[str, int | None] | None) -> bool:
        """Tell whether the server goes by this name. server: the address that the client has connected to."""
        if name == "localhost" or name.endswith(".localhost") or as_address(name) is not None:
            return True
        if _is_among(name, self._names):
            return True
        # A name without a dot is one of a container or of a local network, never one that a stranger could
        # own. On the loopback interface nobody needs such names, and a hostile network could give them out.
        address = None if server is None else as_address(server[0])
        return "." not in name and (address is None or not address.is_loopback)

    def _accepts(self, origin: str, host: str) -> bool:
        """Tell whether pages of this site are the server's own, or named in the settings."""
        authority = origin.partition("://")[2]
        if not authority:  # "null": a page without a site
            return False
        if origin in self._origins or _without_default_port(authority) == _without_default_port(host):
            return True
        # Behind a proxy, Host may be another name. On another port of a name is another program.
        names = [name for name in self._names if name != ALL]
        return ":" not in authority and _is_among(authority, names)


class Preflight(NamedTuple):
    """The answer to a browser that asks whether a page may send a request."""

    status: int
    headers: dict[str, str]


class CrossOrigin:
    """Lets pages of other sites call the server and read its answers (CORS, https://fetch.spec.whatwg.org).

    origins: the sites, such as https://example.org; *: all.
    methods: that they may use.
    exposed: names of headers of answers that they may read.
    """

    def __init__(self, origins: Sequence[str], methods: Sequence[str], exposed: Sequence[str]) -> None:
        self._origins = frozenset(origins)
        self._methods = ", ".join(methods)
        self._exposed = ", ".join(exposed)

    def headers(self, origin: str) -> dict[str, str]:
        """Return the headers by which a browser lets a page of this site read an answer."""
        if not origin or not self._allows(origin):
            return {}
        return {**self._site(origin), "access-control-expose-headers": self._exposed}

    def preflight(self, headers: Mapping[bytes, bytes]) -> Preflight | None:
        """Answer a browser that asks whether a page may send a request.

        headers: of a request with the method OPTIONS. Returns None if it is not such a question.
        """
        if b"origin" not in headers or b"access-control-request-method" not in headers:
            return None
        origin = headers[b"origin"].decode("latin-1")
        if not self._allows(origin):
            return Preflight(400, {"vary": "Origin"})
        wanted = headers.get(b"access-control-request-headers", b"*").decode("latin-1")
        allowed = {
            "access-control-allow-methods": self._methods,
            "access-control-allow-headers": wanted,
            "access-control-max-age": "600",
        }
        return Preflight(200, {**self._site(origin), **allowed})

    def _allows(self, origin: str) -> bool:
        return ALL in self._origins or origin in self._origins

    def _site(self, origin: str) -> dict[str, str]:
        if ALL in self._origins:
            return {"access-control-allow-origin": ALL}
        return {"access-control-allow-origin": origin, "vary": "Origin"}


def _site(origin: bytes | None) -> str:
    if origin is None:
        return "Sec-Fetch-Site: cross-site"
    return f"Origin: {clip(origin.decode('latin-1'), LONGEST)!r}"


def check_server_name(name: str) -> str:
    """Return an empty text if a setting's name is accepted, otherwise the accepted ones in words."""
    rest = "" if name == ALL else name.removeprefix("*.")
    good = name == ALL or (rest and rest == rest.lower() and not any(char in rest for char in "*/:@ []"))
    return (
        "" if good else "*, or a name in small letters without a port, such as example.com or *.example.com"
    )


def _is_among(name: str, names: Iterable[str]) -> bool:
    return any(
        own in (ALL, name) or (own.startswith("*.") and name.endswith(own[1:]) and name != own[1:])
        for own in names
    )


def _name_of(authority: str) -> str:
    """Return the name or address in "NAME:PORT", without brackets and without the dot of a full name."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].removesuffix(".")


def _without_default_port(authority: str) -> str:
    """Return the authority without port 80 or 443: a proxy may change one into the other."""
    return authority.removesuffix(":80").removesuffix(":443")
