"""A TCP proxy on loopback that injects the faults which `plan.py` decides.

It knows HTTP only so far that damaged bytes are in bodies: headers have parts whose damage nobody can notice
without TLS. Everything else is bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.plan import ENDS, FLIPPED, Direction, Fault, Window, generator, plan

CHUNK = 65536
HEAD_END = b"\r\n\r\n"
RESET_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER with which closing a socket sends a reset."""


class Ended(Exception):
    """A fault has ended the connection."""


@dataclass
class Connection:
    """One proxied connection.

    number: in order of acceptance. peer: port of the client.
    injected: kinds of faults that took effect on it.
    """

    number: int
    peer: int
    injected: set[str] = field(default_factory=set)


@dataclass
class _Flow:
    """One direction of a connection.

    passed: bytes since the start of the window. flipped: whether a byte was damaged in this window.
    muted: whether it was stopped.
    """

    direction: Direction
    window: Window | None = None
    fault: Fault | None = None
    passed: int = 0
    flipped: bool = False
    muted: bool = False


class FaultProxy:
    """Passes connections on to a server, with faults while a window is set.

    connections: by the client's port, the latest one. counts: faults that took effect, by kind.

    A connection that a fault has stopped is reset at the end of the window: bytes of it are missing, and TCP
    never leaves a hole.
    """

    def __init__(self, host: str, port: int, seed: int) -> None:
        self._target, self._seed = (host, port), seed
        self._window: Window | None = None
        self._stopped: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.connections: dict[int, Connection] = {}
        self.counts: Counter[str] = Counter()
        self._accepted = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def window(self) -> Window | None:
        """The current window; None: no faults."""
        return self._window

    @window.setter
    def window(self, window: Window | None) -> None:
        self._window = window
        for writer in self._stopped:
            _reset(writer)
        self._stopped.clear()

    async def start(self, port: int = 0) -> None:
        """Listen on a loopback port. 0: a free one."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port and all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._accepted += 1
        connection = Connection(self._accepted, writer.get_extra_info("peername")[1])
        self.connections[connection.peer] = connection
        try:
            await self._serve(connection, reader, writer)
        except (OSError, Ended, asyncio.IncompleteReadError):
            pass
        finally:
            self._stopped.discard(writer)
            writer.transport.abort()

    async def _serve(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        fault = plan(self._seed, connection.number, self.window)
        if fault is not None and fault.kind == "silent":
            self._note(connection, fault)
            self._stopped.add(writer)
            while await reader.read(CHUNK):
                """Accept all and answer nothing."""
            return
        there, back = await asyncio.open_connection(*self._target)
        pumps = [
            asyncio.create_task(self._pump(connection, _Flow("request"), reader, back)),
            asyncio.create_task(self._pump(connection, _Flow("response"), there, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
            failed = [pump.exception() for pump in pumps if pump.done() and not pump.cancelled()]
            if any(isinstance(error, Ended) and error.args == ("reset",) for error in failed):
                _reset(writer)
                _reset(back)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._stopped.discard(back)
            back.transport.abort()

    async def _pump(
        self, connection: Connection, flow: _Flow, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass the bytes of one direction on until it ends. Raises Ended."""
        while data := await reader.read(CHUNK):
            if flow.muted:
                continue
            if flow.window is not self.window:
                flow.window, flow.passed, flow.flipped = self.window, 0, False
                fault = plan(self._seed, connection.number, self.window)
                flow.fault = fault if fault is not None and _concerns(fault, flow.direction) else None
            if flow.fault is None:
                flow.passed += len(data)
                await _write(writer, data)
            else:
                await self._inject(connection, flow, flow.fault, data, writer)
        if not flow.muted and writer.can_write_eof():
            with contextlib.suppress(OSError):
                writer.write_eof()

    async def _inject(
        self, connection: Connection, flow: _Flow, fault: Fault, data: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if fault.kind.startswith("flip"):
            data = self._flip(connection, flow, fault, data)
        elif fault.kind in (*ENDS, "one-way", "silent"):
            room = max(0, fault.after_bytes - flow.passed)
            if len(data) > room:
                self._note(connection, fault)
                await _write(writer, data[:room])
                if fault.kind in ENDS:
                    raise Ended(fault.kind)
                flow.muted = True
                self._stopped.add(writer)
                return
        elif fault.kind in ("latency", "slices", "bandwidth"):
            self._note(connection, fault)
            await self._slow(connection, flow, fault, data, writer)
            return
        flow.passed += len(data)
        await _write(writer, data)

    async def _slow(
        self, connection: Connection, flow: _Flow, fault: Fault, data: bytes, writer: asyncio.StreamWriter
    ) -> None:
        """Pass data on late, in slices, or at a rate, for as long as the window lasts."""
        assert flow.window is not None
        rng = generator(self._seed, connection.number, flow.window, f"{flow.direction}/{flow.passed}")
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s + rng.uniform(0, fault.jitter_s))
        size = fault.slice_bytes or (max(1, fault.bytes_per_s // 20) if fault.bytes_per_s else len(data))
        for start in range(0, len(data), size):
            if flow.window is not self.window or (fault.slice_bytes and start > 200 * size):
                size = len(data)  # the rest at once
            await _write(writer, data[start : start + size])
            if fault.slice_bytes:
                await asyncio.sleep(0)
            elif fault.bytes_per_s:
                await asyncio.sleep(size / fault.bytes_per_s if size < len(data) else 0)
            if size == len(data):
                break
        flow.passed += len(data)

    def _flip(self, connection: Connection, flow: _Flow, fault: Fault, data: bytes) -> bytes:
        """Return the data with one damaged byte, once `after_bytes` bytes of a body have passed.

        If the part at hand has a shorter body, its last byte but four is damaged: the end of a chunk is
        framing.
        """
        if flow.flipped:
            return data
        head = data.find(HEAD_END)
        begin = head + len(HEAD_END) if head >= 0 and data[:4] in (b"POST", b"HTTP") else 0
        last = len(data) - 5
        if last <= begin or (begin == 0 and data[:4] in (b"POST", b"HTTP", b"GET ")):
            return data
        place = min(begin + fault.after_bytes, last)
        flow.flipped = True
        self._note(connection, fault)
        return data[:place] + bytes((FLIPPED,)) + data[place + 1 :]

    def _note(self, connection: Connection, fault: Fault) -> None:
        if fault.kind not in connection.injected:
            connection.injected.add(fault.kind)
        self.counts[fault.kind] += 1


def _concerns(fault: Fault, direction: Direction) -> bool:
    """Whether a fault concerns a direction: one that says nothing stops both."""
    return fault.kind == "silent" or fault.direction == direction


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if data:
        writer.write(data)
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of an orderly end."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_LINGER)
    writer.transport.abort()
