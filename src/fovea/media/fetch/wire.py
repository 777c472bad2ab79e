"""Sends one HTTP/1.1 request over a connection of its own, and trusts nothing that comes back.

The rule: the event loop gets a turn between two reads, and within a read after a few parts. So a timeout
fires and other requests go on, however fast a server sends. Ordinary HTTP clients do not do that: a server
may send informational responses (100 Continue) without end, and they read them without a pause. Everything
that a server can send without end is bounded here, except the body, which `receive` bounds.

There is no connection pool. A connection whose certificate was verified for one name must not carry a request
for another name at the same address, and a server must not learn which downloads belong together.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any

import h11
import httpx

_HEAD_BYTES = 32 * 1024
"""Most bytes before the body, all informational responses included. Real heads have one or two KiB."""
_HEAD_READ = 4 * 1024
_MAX_HEADERS = 200
_MAX_INFORMATIONAL = 16
_BODY_READ = 64 * 1024
_PARTS_PER_TURN = 64
_MIN_PART_BYTES = 256
_FREE_PARTS = 4096
"""A body may have this many parts, and one more for each _MIN_PART_BYTES.

A part is a chunk, or the bytes that arrived together. Each costs some microseconds, however small it is.
"""
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:ECDHE+AES"
"""As in browsers, without DHE: a server may choose its numbers so large that one handshake takes a second."""


class TransferRefused(httpx.RemoteProtocolError):
    """A server sent something that HTTP allows, but that is not accepted here.

    The text is made for clients.
    """


class WireTransport(httpx.AsyncBaseTransport):
    """Sends each request over a new connection to the address in its URL.

    tls: None: certificates are verified against the usual authorities.

    A request has two extensions: "sni_hostname", the name that the certificate is verified against, and
    "connect_timeout_s".
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response before its body arrives.

        Raises ConnectError, ConnectTimeout, ReadError, RemoteProtocolError or TransferRefused.
        """
        wire = await self._connect(request)
        try:
            await wire.send(request)
            head = await wire.receive_head()
            headers = [(bytes(name), bytes(value)) for name, value in head.headers]
        except BaseException:
            wire.close()
            raise
        return httpx.Response(head.status_code, headers=headers, stream=_Body(wire))

    async def _connect(self, request: httpx.Request) -> _Wire:
        name: str = request.extensions["sni_hostname"]
        secure = request.url.scheme == "https"
        if secure and self._tls is None:
            # Reading the certificates of all authorities takes tens of milliseconds.
            self._tls = await asyncio.get_running_loop().run_in_executor(None, _client_tls)
        port = request.url.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(request.extensions["connect_timeout_s"]):
                tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": name} if secure else {}
                reader, writer = await asyncio.open_connection(
                    request.url.host, port, limit=_BODY_READ, **tls
                )
        except TimeoutError:
            raise httpx.ConnectTimeout("no connection in time") from None
        except (OSError, ValueError) as error:  # ValueError: a name that no certificate can have
            raise httpx.ConnectError(str(error)) from None
        return _Wire(reader, writer)


class _Wire:
    """One connection with one request and its response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)

    async def send(self, request: httpx.Request) -> None:
        head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
        try:
            self._writer.write((self._http.send(head) or b"") + (self._http.send(h11.EndOfMessage()) or b""))
            await self._writer.drain()
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from None
        except OSError:
            pass  # the server closed early; perhaps it has sent a response before

    async def receive_head(self) -> h11.Response:
        """Return the response; informational ones before it are dropped."""
        left, informational = _HEAD_BYTES, 0
        while True:
            event = self._next_event()
            if isinstance(event, h11.Response):
                if len(event.headers) > _MAX_HEADERS:
                    raise TransferRefused(f"sends {len(event.headers)} headers; accepted: {_MAX_HEADERS}")
                return event
            if isinstance(event, h11.InformationalResponse):
                informational += 1
                if informational > _MAX_INFORMATIONAL:
                    raise TransferRefused(
                        f"sends more than {_MAX_INFORMATIONAL} informational responses before its response"
                    )
                continue
            if left <= 0:
                raise TransferRefused(f"sends more than {_HEAD_BYTES} bytes before the body")
            left -= await self._read(min(_HEAD_READ, left))

    async def receive_body(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body."""
        wire_bytes = body_bytes = parts = 0
        while True:
            event = self._next_event()
            if isinstance(event, h11.Data):
                parts += 1
                body_bytes += len(event.data)
                if parts > _FREE_PARTS + body_bytes // _MIN_PART_BYTES:
                    raise TransferRefused(f"sends its data in {parts} parts of few bytes each")
                if parts % _PARTS_PER_TURN == 0:
                    await asyncio.sleep(0)
                yield bytes(event.data)
            elif event is h11.NEED_DATA:
                wire_bytes += await self._read(_BODY_READ)
                # Chunks may carry extensions, which are data for nobody.
                if wire_bytes > 2 * (body_bytes + _BODY_READ) + _HEAD_BYTES:
                    raise TransferRefused("sends more framing than data")
            else:
                return

    def close(self) -> None:
        """Close the connection at once, without the farewell of TLS: a server could leave it unanswered."""
        self._writer.transport.abort()

    def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from None

    async def _read(self, most: int) -> int:
        """Read what has arrived, after a turn of the event loop. Return the number of bytes."""
        await asyncio.sleep(0)  # `read` does not wait while its buffer has data
        try:
            data = await self._reader.read(most)
        except OSError as error:
            raise httpx.ReadError(str(error)) from None
        self._http.receive_data(data)
        return len(data)


class _Body(httpx.AsyncByteStream):
    """The body of a response. Closing it closes the connection."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._wire.receive_body():
            yield part

    async def aclose(self) -> None:
        self._wire.close()


def _client_tls() -> ssl.SSLContext:
    """Return the settings of TLS connections; the environment does not change them."""
    context = httpx.create_ssl_context(trust_env=False)
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context
