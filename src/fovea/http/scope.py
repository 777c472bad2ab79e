"""The ASGI scope of a request."""

from __future__ import annotations

import re
import urllib.parse
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fovea.http.address import Proxies
from fovea.http.reader import ParsedHead

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope

_HIDES = re.compile(
    r"(?:/[^/]*){0,1}/[^/]*%(?:2F|5C)|.*%(?:2[DE]|3[0-9]|[46][1-9A-F]|[57][0-9A]|5F|7E)", re.IGNORECASE
)
"""A path that hides a route from the rules of a proxy, as /%61dmin and /admin%2Flive do.

It encodes letters, digits, "-", ".", "_" or "~", which no client does, or a slash in its first two parts,
where no names are. It is not decoded, so it is no route, and no rule has to know it."""
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class Peers(NamedTuple):
    """The two ends of a connection.

    server, client: address and port; None: unknown.
    scheme: "http" or "https".
    """

    server: tuple[str, int | None] | None
    client: tuple[str, int] | None
    scheme: str


def build_scope(head: ParsedHead, peers: Peers, state: dict[str, Any], proxies: Proxies) -> HTTPScope:
    """Return the scope of a request.

    state: the application's state; the scope gets a copy.
    proxies: proxies that may name another client in X-Forwarded-For.
    """
    path = head.path.decode("ascii")
    client = peers.client
    if client is not None and client[0] in proxies:
        named = proxies.client(head.headers)
        client = client if named is None else (named, 0)
    scope = {
        "type": "http",
        "asgi": _ASGI,
        "http_version": head.version,
        "server": peers.server,
        "client": client,
        "scheme": peers.scheme,
        "method": head.method,
        "root_path": "",
        "path": urllib.parse.unquote(path) if "%" in path and not _HIDES.match(path) else path,
        "raw_path": head.path,
        "query_string": head.query,
        "headers": head.headers,
        "state": state.copy(),
    }
    return cast("HTTPScope", scope)
