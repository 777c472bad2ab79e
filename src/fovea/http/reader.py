"""Parses the requests of one connection, with a limit on everything around their bodies.

llhttp tells about a header only when it is complete, and has no limit of its own. So the bytes that it gets
are counted, and it gets them in slices: little beyond a limit is ever parsed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, NoReturn, Protocol

import httptools

from fovea.http.patience import Rules
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


SLICE = 16 * 1024
"""Bytes that the parser gets at a time."""


class Part(IntEnum):
    """The part of a request that comes next."""

    NOTHING = 0
    HEAD = 1
    BODY = 2


class ParsedHead(NamedTuple):
    """The head of a request that is well-formed and within the limits.

    method, version: such as "GET" and "1.1".
    path, query: the target.
    headers: names in lower case, with their values.
    expects_continue: whether the client waits for a sign before it sends the body.
    keep_alive: whether another request may follow on the connection.
    """

    method: str
    version: str
    path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    expects_continue: bool
    keep_alive: bool


class Sink(Protocol):
    """Receives the requests."""

    def begin(self, head: ParsedHead) -> Refusal | None:
        """Take the head of a request, or say why it is refused."""
        ...

    def add_body(self, body: bytes) -> None: ...

    def end(self) -> None:
        """The request is complete."""
        ...


class _Refused(Exception):
    """Stops the parser. The reason is in `Reader._refusal`."""


class Reader:
    """The parser of one connection.

    part: what comes next.
    body_bytes: bytes of the current body that have arrived.
    stopped: whether everything that arrives is dropped.
    """

    def __init__(self, rules: Rules, sink: Sink) -> None:
        self.part = Part.NOTHING
        self.body_bytes = 0
        self._rules = rules
        self._sink = sink
        self._parser = httptools.HttpRequestParser(self)
        self.stopped = False
        self._refusal: Refusal | None = None
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._head: Head | None = None
        self._heads = 0
        self._head_bytes = 0
        self._fed = 0
        self._framing = 0
        self._skipped_body = False

    @property
    def begun(self) -> bool:
        """Whether some bytes of a head have arrived, but not all."""
        return self.part is Part.HEAD or self._head_bytes > 0

    @property
    def body_left(self) -> float:
        """Bytes of the current body that have not arrived; infinite: unknown."""
        if self._head is None or self._head.length is None:
            return math.inf
        return self._head.length - self.body_bytes

    def stop(self) -> None:
        """Drop everything that arrives from now on."""
        self.stopped = True

    def feed(self, data: bytes | memoryview) -> Refusal | None:
        """Parse bytes. Return the reason to refuse the request, after which nothing more is parsed."""
        if len(data) <= SLICE:
            return self._feed(data)
        view, begin = memoryview(data), 0
        while begin < len(data):
            end = begin + max(SLICE, self._plain_body_left)
            if (refusal := self._feed(view[begin:end])) is not None:
                return refusal
            begin = end
        return None

    @property
    def _plain_body_left(self) -> int:
        """Bytes that are certain to belong to the current body, whatever they are."""
        if self.part is not Part.BODY or self._head is None or self._head.length is None:
            return 0
        return self._head.length - self.body_bytes

    def _feed(self, data: bytes | memoryview) -> Refusal | None:
        if self.stopped:
            return None
        part, heads, body_bytes = self.part, self._heads, self.body_bytes
        self._fed = self._head_bytes + len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._ignore_upgrade(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.stopped = True
            return self._refusal or malformed(str(error) or type(error).__name__)
        if self.part is Part.BODY and heads == self._heads:
            return self._count_framing(len(data) - (self.body_bytes - body_bytes))
        if part is not Part.BODY and heads == self._heads:
            self._head_bytes = self._fed
            if self._fed >= self._rules.header_bytes:
                self.stopped = True
                return self._too_large()
        return None

    def _count_framing(self, size: int) -> Refusal | None:
        """Count the bytes around a chunked body: sizes, extensions and trailers.

        They may be as many as those of the body, and one header limit more. A client that sends a long
        extension with each byte, or endless trailers, is refused.
        """
        self._framing += max(0, size)
        if self._framing <= self._rules.header_bytes + SLICE + self.body_bytes:
            return None
        self.stopped = True
        return malformed("its chunks are smaller than what is written around them")

    def _ignore_upgrade(self, rest: memoryview) -> Refusal | None:
        """Go on as if the client had asked for no other protocol.

        llhttp skips the body of such a request, and would read it as the next request. A second parser reads
        it, told by a head of its own how the body ends.
        """
        if self._skipped_body and self._head is not None:
            self._skipped_body = False
            self._parser = httptools.HttpRequestParser(_BodyOnly(self))
            chunked = self._head.chunked
            line = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % self.body_left
            self._parser.feed_data(b"POST / HTTP/1.1\r\nhost: x\r\n" + line + b"\r\n\r\n")
        return self._feed(rest) if rest else None

    def _refuse(self, refusal: Refusal) -> NoReturn:
        self._refusal = refusal
        raise _Refused

    def _too_large(self) -> Refusal:
        text = f"the request line and the headers have more than {self._rules.header_bytes} bytes"
        return Refusal(431, "headers_too_large", text)

    # The parser's calls

    def on_message_begin(self) -> None:
        self.part = Part.HEAD
        self._url = b""
        self._headers = []
        self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._rules.url_bytes:
            text = f"the request's target has more than {self._rules.url_bytes} bytes"
            self._refuse(Refusal(414, "url_too_long", text))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.part is Part.BODY:
            return  # a trailer, which no route reads; among the headers it would pass for one of them
        if len(self._headers) >= self._rules.max_headers:
            text = f"the request has more than {self._rules.max_headers} headers"
            self._refuse(Refusal(431, "too_many_headers", text))
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        version, method = parser.get_http_version(), parser.get_method().decode("ascii")
        checked = check_head(method, version, self._url, self._headers)
        if isinstance(checked, Refusal):
            self._refuse(checked)
        if self._fed > self._rules.header_bytes and self._exact_size() > self._rules.header_bytes:
            self._refuse(self._too_large())
        self._head, target = checked
        self.part = Part.BODY
        self._heads += 1
        self._head_bytes = self._framing = self.body_bytes = 0
        self._skipped_body = parser.should_upgrade() and self._head.length != 0
        keep_alive = version != "1.0" and parser.should_keep_alive() and not self._skipped_body
        url = httptools.parse_url(target)
        head = ParsedHead(
            method, version, url.path, url.query or b"", self._headers, self._expects_continue, keep_alive
        )
        if (refusal := self._sink.begin(head)) is not None:
            self.part = Part.HEAD
            self._refuse(refusal)

    def _exact_size(self) -> int:
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        if not self.stopped:
            self._sink.add_body(body)

    def on_message_complete(self) -> None:
        if not self._skipped_body:  # for such a request, llhttp says so before the body
            self.part = Part.NOTHING
            self._sink.end()


class _BodyOnly:
    """Passes on the body of a request that asked for another protocol, and nothing after it."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def on_body(self, body: bytes) -> None:
        self._reader.on_body(body)

    def on_message_complete(self) -> None:
        self._reader.on_message_complete()
        self._reader.stop()
