"""Checks of a request's head that the parser leaves to the server.

A request that two programs can read in two ways lets an attacker hide one request in another ("request
smuggling"), so it is refused. llhttp already refuses Content-Length beside Transfer-Encoding, repeated or odd
lengths, folded lines, bare line feeds, control characters and spaces before a colon.
"""

from __future__ import annotations

from collections.abc import Sequence

import httptools

from fovea.http.refusals import Refusal, malformed

Headers = Sequence[tuple[bytes, bytes]]
_VERSION = Refusal(505, "http_version", "unknown version of HTTP; accepted: HTTP/1.1 and HTTP/1.0")
_CONNECT = Refusal(405, "method_not_allowed", "CONNECT is for proxies, and this server is not a proxy")


class Head:
    """The headers that decide where a request ends.

    host: the Host header; None: there is none.
    length: bytes of the body; None: unknown, because it arrives in chunks.
    chunked: whether the body arrives in chunks.
    """

    __slots__ = ("chunked", "host", "length")

    def __init__(self, headers: Headers) -> None:
        """Read the headers, whose names are in lower case. Raises ValueError for a repeated or odd one."""
        self.host: bytes | None = None
        self.length: int | None = 0
        self.chunked = False
        for name, value in headers:
            if name == b"host":
                if self.host is not None:
                    raise ValueError("it has several Host headers")
                self.host = value
            elif name == b"content-length":
                self.length = int(value)
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked":
                    raise ValueError("its Transfer-Encoding is not 'chunked', the only accepted one")
                self.chunked, self.length = True, None


def check_head(method: str, version: str, url: bytes, headers: Headers) -> tuple[Head, bytes] | Refusal:
    """Return the head and the path with its query, or the reason to refuse the request.

    version: "1.1" or what else the client says.
    url: the request's target, as it arrived.
    """
    if version not in ("1.1", "1.0"):
        return _VERSION
    if method == "CONNECT":
        return _CONNECT
    try:
        head = Head(headers)
        if head.host is None and version == "1.1":
            raise ValueError("it has no Host header")
        if head.chunked and version == "1.0":
            raise ValueError("HTTP/1.0 has no Transfer-Encoding")
        return head, url if url.startswith(b"/") else _path(method, url, head.host)
    except ValueError as error:
        return malformed(str(error))


def _path(method: str, url: bytes, host: bytes | None) -> bytes:
    """Return the path of a target that does not begin with one. Raises ValueError for an ambiguous target.

    A target may name the server itself (`http://host/path`), as clients of proxies write it. It then has to
    name the same host as the Host header.
    """
    if url == b"*" and method == "OPTIONS":
        return b"/"
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        parsed = None
    schema = b"" if parsed is None else (parsed.schema or b"").lower()
    if parsed is None or schema not in (b"http", b"https") or not parsed.host:
        raise ValueError("its target is neither a path nor an http URL")
    authority = url.partition(b"://")[2]
    for end in b"/?#":
        authority = authority.partition(bytes([end]))[0]
    if host is None or authority.lower() != host.lower():
        raise ValueError("its target names another host than its Host header")
    path = url[url.index(b"://") + 3 + len(authority) :]
    return path if path.startswith(b"/") else b"/" + path
