"""A web server for pictures of requests, with all the faults of media hosts."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import zlib
from collections import Counter
from collections.abc import Sequence

from tests.chaos.items import Item

DRIP_S = 0.25
ENDLESS_BYTES = 8192
OVERSIZED = 60 << 20
BOMB_SIDE = 30_000


class MediaHost:
    """A server with one path for each fault.

    /picture/N.png: the picture of a question. /expired: answers as a signed URL whose time is over.
    canary: requests that reached the private address to which /redirect points; there may be none.
    counts: requests by path.
    """

    def __init__(self, hosted: Sequence[Item]) -> None:
        self._files = [item.images[0] for item in hosted]
        self.counts: Counter[str] = Counter()
        self.canary = 0
        self._bomb = _response(bomb(BOMB_SIDE), "image/png")
        self._canary_port = 0
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int, tls_port: int) -> int:
        """Listen, and return the port. tls_port: where plain HTTP answers a TLS handshake; 0: nowhere."""
        canary = await asyncio.start_server(self._private, "127.0.0.1", 0)
        self._canary_port = canary.sockets[0].getsockname()[1]
        self._servers = [canary, await asyncio.start_server(self._accept, host, port)]
        if tls_port:
            self._servers.append(await asyncio.start_server(self._accept, host, tls_port))
        return int(self._servers[1].sockets[0].getsockname()[1])

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _private(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.canary += 1
        writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError):
            head = await reader.readuntil(b"\r\n\r\n")
            kind, name = head.split(b" ")[1].decode("latin-1").lstrip("/").partition("?")[0].split("/")
            self.counts[kind] += 1
            await self._answer(kind, name, writer)
        writer.close()

    async def _answer(self, kind: str, name: str, writer: asyncio.StreamWriter) -> None:
        whole, head = self._files[0], _head("image/png", len(self._files[0]))
        there = f"location: http://127.0.0.1:{self._canary_port}/canary.png\r\n"
        fixed = {
            "expired": _response(b"<Error>ExpiredToken</Error>", "application/xml", "403 Forbidden"),
            "truncated": head + whole[:-40],
            "reset": head + whole[: len(whole) // 2],
            "bomb": self._bomb,
            "wrong-type": _response(b"<html>This is not a picture.</html>", "image/png"),
            "redirect": _response(b"", "text/plain", "302 Found", there),
        }
        if kind == "picture":
            writer.write(_response(self._files[int(name.partition(".")[0])], "image/png"))
        elif kind == "slow":
            await self._drip(writer)
        elif kind == "oversized":
            writer.write(_head("image/png", OVERSIZED) + whole)
            await self._fill(writer, OVERSIZED)
        elif kind == "endless-video":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: video/mp4\r\nconnection: close\r\n\r\n" + MP4)
            await self._fill(writer, 1 << 40)
        else:
            writer.write(fixed.get(kind) or _response(b"no such file", "text/plain", "404 Not Found"))
        if kind == "reset":
            await writer.drain()
            writer.transport.abort()
        await writer.drain()

    async def _drip(self, writer: asyncio.StreamWriter) -> None:
        """Send a picture so slowly that it never arrives within the time of a download."""
        writer.write(_head("image/png", len(self._files[0])))
        for place in range(len(self._files[0])):
            writer.write(self._files[0][place : place + 1])
            await writer.drain()
            await asyncio.sleep(DRIP_S)

    async def _fill(self, writer: asyncio.StreamWriter, size: int) -> None:
        """Send filler bytes at most 2 MiB per second."""
        for _ in range(size // ENDLESS_BYTES):
            writer.write(b"\0" * ENDLESS_BYTES)
            await writer.drain()
            await asyncio.sleep(ENDLESS_BYTES / (2 << 20))


MP4 = struct.pack(">I4s4sI4s", 20, b"ftyp", b"isom", 512, b"isom") + struct.pack(">I4s", 0, b"mdat")
"""The beginning of a video whose data has no stated end."""


def bomb(side: int) -> bytes:
    """Return a small PNG file of side x side pixels."""
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * ((side // 8 + 1) * 100), 9)
    chunks = ((b"IHDR", head), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def _head(kind: str, length: int, status: str = "200 OK", more: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n"
        f"cache-control: no-store\r\n{more}connection: close\r\n\r\n"
    ).encode()


def _response(body: bytes, kind: str, status: str = "200 OK", more: str = "") -> bytes:
    return _head(kind, len(body), status, more) + body
