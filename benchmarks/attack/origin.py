"""A hostile web server for the attacks with URLs: it answers without end, drips, or sends large pictures."""

from __future__ import annotations

import asyncio
import contextlib

from bombs import filled_jpeg

FILL_MIB = 20
CHUNK = b"X-Filler: " + b"a" * 4000 + b"\r\n"


class Origin:
    """An HTTP server on a free loopback port, in the attacker's event loop.

    /continue/N: endless `100 Continue`. /headers/N: endless headers. /drip/N: one byte of a body every
    half second. /silent/N: accepts and never answers. /fill/N: a JPEG of 20 MiB of fill bytes.
    """

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None
        self._jpeg = b""

    async def __aenter__(self) -> Origin:
        self._jpeg = filled_jpeg(0, FILL_MIB << 20)
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    def url(self, kind: str, number: int) -> str:
        return f"http://127.0.0.1:{self.port}/{kind}/{number}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.CancelledError):
            line = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode("latin-1")
            _, kind, number = line.split("/")
            await getattr(self, f"_{kind}")(writer, int(number))
        with contextlib.suppress(OSError):
            writer.close()

    async def _continue(self, writer: asyncio.StreamWriter, number: int) -> None:
        while True:
            await self._send(writer, b"HTTP/1.1 100 Continue\r\n\r\n" * 50)
            await asyncio.sleep(0.01)

    async def _headers(self, writer: asyncio.StreamWriter, number: int) -> None:
        await self._send(writer, b"HTTP/1.1 200 OK\r\n")
        while True:
            await self._send(writer, CHUNK)
            await asyncio.sleep(0.01)

    async def _drip(self, writer: asyncio.StreamWriter, number: int) -> None:
        await self._send(
            writer, b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 1000000\r\n\r\n"
        )
        while True:
            await self._send(writer, b"\x89")
            await asyncio.sleep(0.5)

    async def _silent(self, writer: asyncio.StreamWriter, number: int) -> None:
        await asyncio.sleep(3600)

    async def _fill(self, writer: asyncio.StreamWriter, number: int) -> None:
        # The comment segment at the start has a number, so that no picture equals another one.
        data = self._jpeg[:6] + b"%08d" % number + self._jpeg[14:]
        head = f"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
        await self._send(writer, head.encode())
        for start in range(0, len(data), 1 << 20):
            await self._send(writer, data[start : start + (1 << 20)])

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()
