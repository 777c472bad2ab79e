"""The producer's side of shared memory: the slab, and the Unix socket that hands it to consumers.

The slab is an anonymous memory file (memfd_create). The kernel frees it with the last process that has it,
however the processes end, and nothing has to be removed from /dev/shm. Its size is sealed, so no process can
cut it short while another reads it. It is sealed against writing, too, except through the mapping that the
producer made before: a consumer gets a descriptor that only reads, and cannot open it again to write.

One thread serves all consumers. Messages have a fixed size and are datagrams of a connection
(SOCK_SEQPACKET), so none arrives in parts and nothing is parsed:

    producer -> consumer  HELLO    status, size of the slab; with the descriptor of the slab
    consumer -> producer  REQUEST  pin or release, lease, start, size
    producer -> consumer  REPLY    status, lease; only to a pin
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import secrets
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.core.private_files import private_folder
from fovea.engine.transfer.offered import OfferedValues

VERSION = 1
HELLO = struct.Struct("<BB6xQ")  # version, status, size of the slab
REQUEST = struct.Struct("<BB6xQQQ")  # version, operation, lease, start, size
REPLY = struct.Struct("<BB6xQ")  # version, status, lease
PIN, RELEASE = 1, 2
OK, ENDED, FULL = 0, 1, 2
SOCKET_NAME = re.compile(r"fovea-([0-9]{1,10})-[0-9a-f]{8}\.sock")
TICK_S = 1.0
"""How often leases are expired, and what is idle is closed."""
LONGEST_PATH = 107
"""Most bytes of a Unix socket's path in Linux."""
_STARTING_S = 60.0
_SEAL_FUTURE_WRITE = 0x0010  # fcntl.F_SEAL_FUTURE_WRITE exists since Python 3.14
log = logging.getLogger("fovea.engine")


class SharedSlab:
    """An anonymous memory file that only this process can write, and whose size nobody can change.

    view: the memory. size: its bytes. reader: a descriptor for consumers, which only reads.
    """

    def __init__(self, size: int) -> None:
        fd = os.memfd_create("fovea-transfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            self.view = memoryview(mmap.mmap(fd, size))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            with suppress(OSError):  # unknown to kernels before 5.1: there the descriptor alone is read-only
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
            self.reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self.size = size

    def close(self) -> None:
        """Let the memory go. It is unmapped when no thread copies from it any more."""
        os.close(self.reader)
        self.view = memoryview(b"")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other end of a Unix socket, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def open_folder(folder: Path) -> Path:
    """Create the folder of sockets for this user alone, and return it without links. Raises ConfigError."""
    reason = private_folder(folder, may_be_link=True)
    if reason is not None:
        raise ConfigError(f"the folder of transfer sockets cannot be used: {reason}")
    folder = folder.resolve()
    longest = len(os.fsencode(folder)) + len("/fovea-4294967295-01234567.sock")
    if longest > LONGEST_PATH:
        raise ConfigError(
            f"the path of the folder of transfer sockets is {longest - LONGEST_PATH} bytes too long: {folder}"
        )
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)
    return folder


def remove_stale_sockets(folder: Path) -> int:
    """Remove the sockets of processes that ended without closing them. Returns their number."""
    removed = 0
    for path in folder.iterdir():
        match = SOCKET_NAME.fullmatch(path.name)
        with suppress(OSError):
            if match and stat.S_ISSOCK(path.lstat().st_mode) and _is_stale(path, int(match[1])):
                path.unlink()
                removed += 1
    return removed


def _is_stale(path: Path, pid: int) -> bool:
    """Tell whether nobody listens at a socket.

    Between its creation and the moment when it listens, a socket refuses connections, too. So it is stale at
    once if its process is gone, and otherwise (numbers of processes are used again) after a minute.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            is_gone = not os.path.exists(f"/proc/{pid}")
            return is_gone or time.time() - path.lstat().st_mtime > _STARTING_S
        except OSError:
            return False
    return False


@dataclass(slots=True)
class _Consumer:
    """A connection from a consumer. holder: its number in the slab. used_at: time of its last request."""

    connection: socket.socket
    holder: int
    used_at: float


class SlabServer:
    """Serves a slab to consumers over a socket in `folder`, in a thread of its own."""

    def __init__(
        self,
        folder: Path,
        slab: SharedSlab,
        values: OfferedValues,
        *,
        most_connections: int,
        each_tick: Callable[[], None],
    ) -> None:
        """folder: as from `open_folder`. each_tick: called about every second. Raises OSError."""
        self.place = str(folder / f"fovea-{os.getpid()}-{secrets.token_hex(4)}.sock")
        self._slab = slab
        self._values = values
        self._most_connections = most_connections
        self._each_tick = each_tick
        self._consumers: dict[int, _Consumer] = {}
        self._next_holder = 1
        self._is_stopped = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._waker, self._wakened = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        try:
            self._listener.setblocking(False)
            self._listener.bind(self.place)
            self._listener.listen(most_connections)
        except BaseException:
            with suppress(OSError):
                os.unlink(self.place)
            self._close_all()
            raise
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakened, selectors.EVENT_READ, lambda: None)
        self._thread = threading.Thread(target=self._run, name="fovea-transfer", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        return len(self._consumers)

    def close(self) -> None:
        """Remove the socket, end the thread and all connections."""
        with suppress(OSError):
            os.unlink(self.place)
        self._is_stopped = True
        self._waker.send(b"x")
        self._thread.join()
        self._close_all()

    def _close_all(self) -> None:
        for consumer in list(self._consumers.values()):
            self._drop(consumer)
        self._selector.close()
        for each in (self._listener, self._waker, self._wakened):
            each.close()

    def _run(self) -> None:
        next_tick = time.monotonic() + TICK_S
        while not self._is_stopped:
            for key, _ in self._selector.select(max(next_tick - time.monotonic(), 0)):
                self._attempt(key.data)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                self._attempt(self._each_tick)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # a defect must not end the thread: all transfers would hang
            log.exception("transfer: a defect in the thread that serves shared memory")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                log.warning("transfer: a connection cannot be accepted: %s", error)
                time.sleep(0.05)  # without free descriptors, select would return at once again and again
            return
        connection.setblocking(False)
        try:
            if peer_of(connection)[1] != os.geteuid():
                log.warning("transfer: a process of another user connected to %s", self.place)
                connection.close()
            elif not self._make_room():
                connection.send(HELLO.pack(VERSION, FULL, 0))
                connection.close()
            else:
                hello = HELLO.pack(VERSION, OK, self._slab.size)
                socket.send_fds(connection, [hello], [self._slab.reader])
                self._add(connection)
        except OSError:
            connection.close()

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest if there are too many. False: all have pins."""
        if len(self._consumers) < self._most_connections:
            return True
        for consumer in sorted(self._consumers.values(), key=lambda each: each.used_at):
            if not self._values.holds_pins(consumer.holder):
                self._drop(consumer)
                return True
        return False

    def _add(self, connection: socket.socket) -> None:
        consumer = _Consumer(connection, self._next_holder, time.monotonic())
        self._next_holder += 1
        self._consumers[consumer.holder] = consumer
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._serve(consumer))

    def _serve(self, consumer: _Consumer) -> None:
        """Answer one request. A consumer that ended, breaks the rules or reads no replies is dropped."""
        if consumer.holder not in self._consumers:
            return  # dropped to make room, in the same round of events
        try:
            message = consumer.connection.recv(REQUEST.size + 1)
            version, operation, lease, start, size = REQUEST.unpack(message)
        except (OSError, struct.error):
            self._drop(consumer)
            return
        consumer.used_at = time.monotonic()
        if version != VERSION or operation not in (PIN, RELEASE):
            self._drop(consumer)
        elif operation == RELEASE:
            self._values.end(lease, start, size, consumer.holder)
        else:
            value = self._values.pin(lease, start, size, consumer.holder)
            status = ENDED if value is None else OK
            try:
                consumer.connection.send(REPLY.pack(VERSION, status, lease))
            except OSError:
                self._drop(consumer)

    def _drop(self, consumer: _Consumer) -> None:
        """Close a connection, which ends its pins."""
        if self._consumers.pop(consumer.holder, None) is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(consumer.connection)
            consumer.connection.close()
            self._values.unpin(consumer.holder)
