"""HTTP connections of the load generator, the bodies that it sends, and the reasons why requests fail.

The library is aiohttp. Its parser is compiled, so one process can send several times the load that it can
send by a client in pure Python (benchmarks/load_generator.py).
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError

KEEPALIVE_S = 2.0
"""Seconds for which an idle connection is reused.

Servers keep theirs longer, so none is closed while we reuse it.
"""
CONNECT_S = 10.0
"""Seconds in which a connection must be open, its name looked up and its TLS agreed."""
MAX_HEADER = 2**16
"""Bytes that one header line of an answer may have."""
LARGE_BODY = 2**20
"""Bytes from which a body is written in pieces, so that other streams are read in between."""


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """Open a session, in the event loop that runs. api_key: sent with every request.

    The number of connections is not limited: a client that queues requests itself would hide the server's
    queue. Proxies from the environment are ignored, because a run would measure them as well. The server is
    asked not to compress its answers, because that would delay events and cost time here.
    """
    headers = {"Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
        trust_env=False,
        max_line_size=MAX_HEADER,
        max_field_size=MAX_HEADER,
    )


def json_body(value: Mapping[str, Any]) -> bytes | io.BytesIO:
    """Write a JSON body in the form that the session sends without blocking the event loop.

    Half a surrogate pair, which a server's answer may end with, has no UTF-8 and is sent as "?".
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    body = text.encode(errors="replace")
    return body if len(body) < LARGE_BODY else io.BytesIO(body)


class EndOfConnection:
    """Ends the reading of an answer when its connection is closed, as a context manager around the reading.

    aiohttp 3.14 does that itself, except where its compiled parser refuses a chunk of the answer: it closes
    the connection then, and the reader waits for the rest without end.
    """

    __slots__ = ("_closed", "_content")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        connection = response.connection  # None if the whole answer is here already
        protocol = None if connection is None else connection.protocol
        self._closed = None if protocol is None else protocol.closed

    def __enter__(self) -> None:
        if self._closed is not None:
            self._closed.add_done_callback(self._end)
            # Once per connection, of which this may not be the first request.
            self._closed.remove_done_callback(_retrieve)
            self._closed.add_done_callback(_retrieve)

    def __exit__(self, *_: object) -> None:
        if self._closed is not None:
            self._closed.remove_done_callback(self._end)

    def _end(self, _: object) -> None:
        if not self._content.is_eof() and self._content.exception() is None:
            self._content.set_exception(aiohttp.ClientConnectionError("a chunk of the answer is no HTTP"))


def _retrieve(closed: asyncio.Future[None]) -> None:
    """Retrieve the error by which a connection ended; asyncio logs errors that no code retrieves."""
    if not closed.cancelled():
        closed.exception()


def is_unreachable(error: aiohttp.ClientError) -> bool:
    """Whether the request failed before it had a connection."""
    unreachable = aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL
    return isinstance(error, unreachable)


def reason(error: aiohttp.ClientError) -> str:
    """Say in one sentence why a request failed, without the library's own terms."""
    match error:
        case aiohttp.ClientConnectorError():
            return _system_reason(error.os_error)
        case aiohttp.ConnectionTimeoutError():
            return f"no connection within {CONNECT_S:g} s"
        case aiohttp.ServerDisconnectedError():
            return "Server disconnected without sending a response."
        case aiohttp.ClientPayloadError() if isinstance(error.__cause__, ContentEncodingError):
            return f"the answer cannot be decoded: {error.__cause__.message}"
        case aiohttp.ClientPayloadError():
            return "peer closed connection without sending complete message body"
        case aiohttp.ClientResponseError():
            return f"the answer is no HTTP: {' '.join(error.message.split())}"
        case OSError():
            return _system_reason(error)
    return str(error) or type(error).__name__


def _system_reason(error: OSError) -> str:
    """The system's words, such as "Connection refused", or the words of TLS or of the name service."""
    if isinstance(error, ssl.SSLError):
        return str(error)
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__
