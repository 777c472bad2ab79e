"""Questions to a socket that neither read from it nor block, and its abrupt end."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from contextlib import suppress
from typing import Any

_GONE = frozenset({0, 7, 8, 9, 11})
"""States of a TCP connection in which its peer has ended it: ended, CLOSE, CLOSE_WAIT, LAST_ACK, CLOSING."""
_RESET = struct.pack("ii", 1, 0)


def has_unread_bytes(sock: socket.socket | None) -> bool:
    """Tell whether bytes have arrived that nobody has read yet."""
    try:
        return sock is not None and bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def peer_is_gone(sock: socket.socket | None) -> bool:
    """Tell whether the peer has closed the connection, even if bytes before its end are still unread.

    Only Linux knows; elsewhere the answer is False.
    """
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _GONE
    except OSError:
        return False


def unacknowledged_bytes(sock: Any) -> int:
    """Return the bytes in the kernel's send buffer, which the peer has not acknowledged; 0: unknown.

    sock: a socket, or a transport's view of it; None: there is none.
    """
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    except (AttributeError, OSError, ValueError):
        return 0


def reset_on_close(sock: socket.socket | None) -> None:
    """Let the next close drop what the kernel holds for the peer, instead of waiting until the peer reads."""
    if sock is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
