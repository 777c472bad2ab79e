"""Messages between the server and a worker: JSON with a length before it, and file descriptors beside it.

Nothing is unpickled: a worker that was taken over can only return wrong answers. Files and pixels do not go
through the socket. They are in anonymous memory files (memfd_create) whose size is sealed, so that
a worker cannot cut a file short while the server reads it.
"""

from __future__ import annotations

import array
import fcntl
import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

MAX_MESSAGE = 8 << 20
"""Most bytes of a message: a video of a million frames lists two million numbers."""
WAKE_S = 0.05
"""How often a waiting server asks whether the answer is still wanted."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LENGTH = struct.Struct(">I")
_MAX_FDS = 2

Message = dict[str, Any]


class WorkerGone(Exception):
    """The other side has closed the connection."""


class TooSlow(Exception):
    """No answer came before the deadline."""


class Channel:
    """One end of the socket pair. Server and worker speak in turns, so no message waits behind another."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, message: Message, fds: Iterable[int] = ()) -> None:
        """Send a message. fds: descriptors that the other side gets copies of. Raises WorkerGone."""
        body = json.dumps(message).encode()
        frame = _LENGTH.pack(len(body)) + body
        fds = list(fds)
        try:
            sent = socket.send_fds(self._socket, [frame], fds) if fds else 0
            self._socket.sendall(memoryview(frame)[sent:])
        except OSError as error:
            raise WorkerGone from error

    def receive(
        self, deadline: float | None = None, each_wait: Callable[[], None] | None = None
    ) -> tuple[Message, list[int]]:
        """Return the next message and its descriptors, which belong to the caller.

        deadline: on the monotonic clock; None: wait for ever.
        each_wait: called about every WAKE_S seconds while nothing arrives; it may raise.
        Raises WorkerGone, TooSlow, and what `each_wait` raises.
        """
        received = bytearray()
        fds: list[int] = []
        needed = _LENGTH.size
        try:
            while len(received) < needed:
                self._wait(deadline, each_wait)
                received += self._read(needed - len(received), fds)
                if len(received) == needed == _LENGTH.size:
                    needed += _LENGTH.unpack(received)[0]
                    if needed > MAX_MESSAGE:
                        raise WorkerGone
            message = json.loads(received[_LENGTH.size :])
            if not isinstance(message, dict):
                raise WorkerGone
        except (OSError, ValueError, RecursionError) as error:
            _close(fds)
            raise WorkerGone from error
        except BaseException:
            _close(fds)
            raise
        return message, fds

    def close(self) -> None:
        self._socket.close()

    def _wait(self, deadline: float | None, each_wait: Callable[[], None] | None) -> None:
        """Set the socket's timeout to the next moment at which something has to be asked."""
        if each_wait is not None:
            each_wait()
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TooSlow
        self._socket.settimeout(left if each_wait is None else min(WAKE_S, left or WAKE_S))

    def _read(self, count: int, fds: list[int]) -> bytes:
        """Read up to `count` bytes; none if nothing came before the socket's timeout."""
        try:
            data, ancillary, _, _ = self._socket.recvmsg(
                min(count, 1 << 16), socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
            )
        except TimeoutError:
            return b""
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                fds += numbers
        if not data:
            raise WorkerGone
        return data


class SharedMemory:
    """An anonymous file of a fixed size, mapped for reading and writing. Nobody can resize it.

    fd: its descriptor, to be sent to the other side.
    size: bytes.
    """

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("fovea", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.bytes = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.size = size

    def close(self) -> None:
        """Unmap and close the file. It lives on while the other side has it mapped."""
        self.bytes.close()
        os.close(self.fd)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
