"""Pictures of one colour, a decompression bomb, and a server of images that misbehaves.

The server listens on the loopback interface. The path of a request chooses what is wrong:

/good       a picture                     /404, /500  errors
/drip       a byte every now and then     /hang       no answer at all
/reset      the connection is reset       /short      ends before the length that was announced
/long       says one byte, sends more     /text       no picture
/bomb       a small file of 2.5 gigapixels
"""

from __future__ import annotations

import base64
import contextlib
import socket
import struct
import threading
import zlib
from collections import Counter
from types import TracebackType


def png(width: int, height: int, colour: tuple[int, int, int] = (40, 90, 200)) -> bytes:
    """Return a picture in one colour."""
    row = b"\0" + bytes(colour) * width
    return _file(width, height, zlib.compress(row * height, 9))


def bomb(side: int = 50_000) -> bytes:
    """Return a small file that says it is a square of `side` pixels, and holds a part of these pixels."""
    return _file(side, side, zlib.compress(bytes(1 << 22), 9))


def data_url(picture: bytes) -> str:
    """Return a picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _file(width: int, height: int, pixels: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


FAULTS = ("drip", "hang", "reset", "404", "500", "short", "long", "text", "bomb")
DRIP_S = 0.3
LONGEST_S = 120.0
"""Seconds after which a host that hangs lets a connection go."""


class ImageHosts:
    """The server, as a context manager.

    hits: number of connections by path.
    """

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="doctor-images", daemon=True)

    def __enter__(self) -> ImageHosts:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    @property
    def url(self) -> str:
        """The URL without a path."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{host}:{port}"

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10.0)
            request = connection.recv(65536).decode("latin-1")
            path = request.split(" ")[1].split("?")[0].strip("/") if request.count(" ") > 1 else ""
            self.hits[path] += 1
            self._misbehave(connection, path)

    def _misbehave(self, connection: socket.socket, path: str) -> None:
        picture = png(64, 64)
        if path == "drip":
            connection.sendall(_head(200, 100_000))
            for _ in range(int(LONGEST_S / DRIP_S)):
                if self._ended.wait(DRIP_S):
                    return
                connection.sendall(b"\x89")
        elif path == "hang":
            self._ended.wait(LONGEST_S)
        elif path == "reset":
            # With no time to linger, closing sends a reset in place of an orderly end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif path in ("404", "500"):
            connection.sendall(_head(int(path), 2) + b"no")
        elif path == "short":
            connection.sendall(_head(200, len(picture) + 1000) + picture[: len(picture) // 2])
        elif path == "long":
            connection.sendall(_head(200, 1) + picture)
        elif path == "text":
            connection.sendall(_head(200, 15) + b"no picture here")
        else:
            body = bomb() if path == "bomb" else picture
            connection.sendall(_head(200, len(body)) + body)


def _head(status: int, length: int) -> bytes:
    return (
        f"HTTP/1.1 {status} OK\r\nContent-Type: image/png\r\nContent-Length: {length}\r\n"
        "Connection: close\r\nCache-Control: no-store\r\n\r\n"
    ).encode()
